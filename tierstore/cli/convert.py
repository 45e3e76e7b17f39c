"""``tierstore convert FILE``: from a configuration of DeepSpeed's or Accelerate's, the YAML of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

from tierstore.cli import accelerate_config, deepspeed_config
from tierstore.cli.conversion import Conversion, require_mapping
from tierstore.cli.run_document import to_yaml
from tierstore.cli.text_files import read_text, require_own, require_places, write_text
from tierstore.config import yaml_text
from tierstore.errors import UsageError
from tierstore.formats import json_text

_BYTE_ORDER: Final = "\ufeff"  # some editors begin a file so

WRITTEN_BY: Final = "written by tierstore convert"
"""What the YAML begins with."""


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "convert",
        parents=[shared],
        help="write the YAML of a run from a configuration of DeepSpeed's or Accelerate's",
        description="Read what a ds_config.json of DeepSpeed's, or the YAML that `accelerate config` writes, "
        "says of offloading, and print the YAML for offload(), with what became of each key.",
    )
    parser.add_argument("source", metavar="FILE", help="a ds_config.json, or a YAML file of Accelerate's")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the YAML there")
    parser.add_argument("--json", action="store_true", help="one JSON object: the document, and the remarks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert, print and write what is asked for.

    Raises:
        UsageError: the file cannot be read, is none of what it should be, or says what cannot be; or the
            YAML cannot be written.
    """
    source, output = str(options.source), options.output
    if output is not None:
        _require_another_place(source, output)
    conversion = converted(read_text(Path(source), yaml_text.MOST_BYTES), source)
    text = to_yaml(conversion.document, [f"{WRITTEN_BY} from {Path(source).name!r}", *conversion.remarks])
    if output is not None:
        write_text(Path(output), text)
    if options.json:
        told = {"document": conversion.document, "remarks": conversion.remarks}
        print(json.dumps(told, allow_nan=False, indent=2))
    elif output is None:
        print(text, end="")
    else:
        print("\n".join([*conversion.remarks, f"the YAML for offload() is in {output}"]))
    return 0


def converted(text: str, source: str) -> Conversion:
    """Return what becomes of a configuration.

    Args:
        text: JSON if it begins as an object of JSON does, else YAML.
        source: what messages call it.

    Raises:
        ConfigError: it is neither, or lists every fault.
        UsageError: it is no configuration of DeepSpeed's or Accelerate's.
    """
    given = require_mapping(_parsed(text, source), source)
    if any(key in given for key in accelerate_config.SECTIONS):
        return accelerate_config.converted(given, source)
    if any(key in given for key in deepspeed_config.SECTIONS):
        return deepspeed_config.converted(given, source)
    raise UsageError(
        f"{source}: no configuration that is known; accepted: a ds_config.json of DeepSpeed's, which has a "
        f"section {deepspeed_config.SECTIONS[0]}, and a YAML file of Accelerate's, which has one of "
        f"{', '.join(accelerate_config.SECTIONS)}"
    )


def _parsed(text: str, source: str) -> object:
    text = text.removeprefix(_BYTE_ORDER)
    if not text.lstrip().startswith("{"):
        return yaml_text.parse(text, source)
    try:
        return json_text.parse(text, most_chars=yaml_text.MOST_BYTES)
    except ValueError as cause:
        raise UsageError(f"{source}: no JSON: {cause}") from cause


def _require_another_place(source: str, output: str) -> None:
    """Refuse to write over what is no YAML of ours, or over the file that is read.

    Raises:
        UsageError: it would be.
    """
    require_places([output])
    try:
        is_same = Path(output).samefile(source)
    except (OSError, ValueError):  # one of them is not there
        is_same = False
    if is_same:
        raise UsageError(f"{output} is the file that is read; give another path")
    require_own(output, f"# {WRITTEN_BY}".encode(), WRITTEN_BY)
