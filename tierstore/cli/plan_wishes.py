"""What a call of ``tierstore plan`` asks for, read from its arguments and the files that they name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tierstore.cli.finding import RunWish
from tierstore.cli.plan_ranks import ranks_of
from tierstore.cli.programs import ModelWish
from tierstore.cli.text_files import named_file, read_text
from tierstore.config import OffloadConfig, yaml_text
from tierstore.config.document import load
from tierstore.errors import UsageError
from tierstore.planning import Placement
from tierstore.quoting import quoted
from tierstore.training.activations import Sections, read_sections, section_values
from tierstore.training.tracing import Grouping
from tierstore.units import parse_bytes

RULES = "rules"
"""What stands for a placement in the place of a file: what is decided without a search."""

_DOCUMENT = ("offload_config", "context", "swap_config", "recompute_config")


def run_wish(options: argparse.Namespace) -> RunWish:
    """Return what is wanted of the run.

    Raises:
        UsageError: a file cannot be read, or is none of what it should be.
        ConfigError: what it says is wrong: every fault is listed.
    """
    ranks = ranks_of(options)
    settings, sections, values = OffloadConfig(), Sections(), {}
    if options.config is not None:
        settings, sections = OffloadConfig.from_yaml(options.config), read_sections(options.config)
        values = section_values(load(Path(options.config)))
    wish = RunWish(settings, sections, section_values=values, ranks=ranks)
    return wish if options.placement is None else with_placement(wish, options.placement)


def with_placement(wish: RunWish, given: str) -> RunWish:
    """Return a wish with a placement that is to be predicted as it is.

    Args:
        wish: beside that.
        given: `RULES`, or the path of a file: a placement, or a configuration that has one.

    Raises:
        UsageError: the file cannot be read, or is neither.
        ConfigError: what it says is wrong.
    """
    if given == RULES:
        return replace(wish, placement={})
    found = yaml_text.parse(read_text(Path(given), yaml_text.MOST_BYTES), given)
    if not isinstance(found, Mapping):
        raise UsageError(f"{given}: {quoted(found)} is no placement; accepted: a mapping of its keys")
    with named_file(given):
        if not any(section in found for section in _DOCUMENT):
            Placement.from_mapping(found)
            return replace(wish, placement=found)
        return replace(
            wish,
            placement=OffloadConfig.from_document(found).placement or {},
            sections=read_sections(given),
            section_values=section_values(found),
        )


def model_wish(options: argparse.Namespace, settings: OffloadConfig, fastest_bytes: int) -> ModelWish:
    """Return which program is meant.

    Args:
        options: of the call.
        settings: of the run.
        fastest_bytes: of its fastest tier: small modules travel together by it.
    """
    smallest = settings.buffer_min_size
    return ModelWish(
        model=options.model,
        trace=options.program,
        batch=options.batch,
        sequence=options.sequence,
        dtype=options.dtype,
        optimizer=options.optimizer,
        grouping=Grouping(
            buffer_min_bytes=None if smallest is None else parse_bytes(smallest), left_bytes=fastest_bytes
        ),
    )


def quotas_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the quotas that a call gives, by tier."""
    given = {"device": options.max_device_memory, "host": options.max_host_memory, "disk": options.max_disk}
    return {tier: nbytes for tier, nbytes in given.items() if nbytes is not None}
