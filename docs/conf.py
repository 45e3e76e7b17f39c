"""Sphinx: Markdown pages, and the reference from docstrings."""

from importlib.metadata import version as _version

project = "tierstore"
author = "the tierstore authors"
copyright = "2026, the tierstore authors"
release = version = _version("tierstore")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"tierstore {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpick_ignore_regex = [
    # There is no network where this is built, so other projects' pages are not linked to.
    (
        r"py:.*",
        r"(torch|numpy|zarr|collections|pathlib|types|pickle|typing|threading|asyncio|os|enum|re)(\..*)?",
    ),
    (r"py:.*", r"(accelerate|lightning|opentelemetry|prometheus_client|transformers)\..*"),
    (r"py:class", r"contextlib\..*"),
    # What exporters ask of a run, a writer and a profiler.
    (
        r"py:class",
        r"tierstore\.integrations\.(logged\.Measured|tensorboard\.ScalarWriter|profiling\.ChromeTraced)",
    ),
    # What `offload` takes, as keywords of a Trainer's.
    (r"py:class", r"tierstore\.integrations\.transformers\.(trainer\.AnyTrainerT|runs\.TrainerOptions)"),
    # What weights may come from, beside a path.
    (r"py:class", r"tierstore\.formats\.safetensors_files\.TensorSource"),
    # A name in single backticks is linked where there is something to link to.
    (r"py:obj", r".*"),
    # A backend's classes are reached through its factory.
    (r"py:class", r"tierstore_backends\..*"),
    # What a store hands to the leases and readers it makes.
    (r"py:class", r"tierstore\.core\.messages\.ReplicaId"),
    (r"py:class", r"tierstore\.engine\.engine\.Engine"),
    (r"py:class", r"tierstore\.crates\.index\.CrateUse"),
    # What optimizers of tables remember of a step that failed, for the next one.
    (r"py:class", r"tierstore\.optim\.failed_step\.FailedStep"),
    # What a run gives to the tracer as it groups its own tensors.
    (r"py:class", r"tierstore\.training\.bundles\.grouping\.Group"),
    # Type variables have no page.
    (r"py:class", r"(.*\.)?[A-Z][a-z]*T|(.*\.)?T"),
]
