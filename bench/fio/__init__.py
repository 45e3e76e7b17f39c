"""fio's job files, asked of the store: parse, plan, run, report.

Rule 1: a key means what fio says it means, or it is refused by name; nothing is ignored.
Rule 2: one I/O of ``ioengine=tierstore`` is one operation of a `tierstore.Store` on one whole tensor of
``bs`` bytes.  Every other ``ioengine`` is fio's own: fio itself runs that section.
Rule 3: what an operation waits for is a completion or a moment of the clock, never a poll.
Rule 4: a report has fio's keys, nesting and units; what only a store has stands under ``tierstore``.

``jobfile`` knows the file's form, ``keys`` what may stand in it, ``job`` what it means; ``sequence`` and
``content`` make the work, ``shelf`` opens stores and ``operations`` uses them, ``runner`` does the work;
``tally`` counts, ``report`` and ``terminal`` print, ``plots`` draws; ``outside`` runs fio.
"""
