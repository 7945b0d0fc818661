"""Drawn cases have no deadline: no test depends on a time, beside other load."""

import hypothesis

hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
