"""One page of HTML that shows timelines: where the time went, what moved, who held the memory.

1. The page is one file and asks for nothing else: its policy forbids every request.
2. What is shown of a run is data in it, never markup and never a program: names may be anything.
3. Numbers stand in tables that are there without a script; the script draws the pictures.
4. A page is bounded: long runs are joined into bars before they are written (`tierstore.cli.page.binning`).

It knows nothing of who made a timeline: predicted and measured ones are the same to it.
"""

from tierstore.cli.page.document import MOST_BARS, write_page

__all__ = ["MOST_BARS", "write_page"]
