"""Tables of plain data as text, HTML and pictures; others decide what they say."""
