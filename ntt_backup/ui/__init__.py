"""A person sees a run on a terminal, or all targets on a web page."""
