"""Whether `--hypothesis-profile=long` was given: more and larger examples."""

import hypothesis

LONG = hypothesis.settings.get_current_profile_name() == 'long'
