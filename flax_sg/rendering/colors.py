"""Colours of a gradient flow, told apart by colour-blind people and in grey."""

# For each status the colour of a cell, and of the word in it. From the palette of Okabe
# and Ito; their lightness falls from what is not used to what is trained.
CELLS = {
    'flows': ('#0072b2', '#ffffff'),
    'partly': ('#56b4e9', '#000000'),
    'stopped': ('#e8e8e8', '#333333'),
    'unused': ('#ffffff', '#767676'),
}
