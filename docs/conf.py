# Sphinx settings. Build: sphinx-build -n -W --keep-going docs docs/_build
from importlib.metadata import version as _version

project = "resilience_pipeline"
author = "The resilience_pipeline authors"
project_copyright = "2026, The resilience_pipeline authors"
release = version = _version("resilience-pipeline")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"{project} {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = [
    "misc.highlighting_failure",  # examples use `await` at the top level, which the lexer may refuse
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# What a docstring doesn't describe is either an attribute, described as such, or not for users.
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"

# The build needs no network, so there is no index of other projects' names to check against: only
# references to our own names must resolve, and of those not what a private module keeps for itself
# (type variables, above all).
nitpick_ignore_regex = [
    ("py:.*", r"(?!resilience_pipeline\.).*"),
    ("py:.*", r"resilience_pipeline\.(\w+\.)*_.*"),
]
