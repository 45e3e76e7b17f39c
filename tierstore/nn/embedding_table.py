"""Embeddings of which a batch's rows are brought, and nothing else: a module."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from tierstore.errors import ConfigError, UsageError
from tierstore.nn import ids as ids_of
from tierstore.nn.arguments import TableArguments, lowered
from tierstore.nn.asked_ahead import require_in_time
from tierstore.nn.initializers import Initializer, rows_of
from tierstore.nn.lookup import clipped, gather, on_device_of
from tierstore.nn.row_blocks import check_room, own_of
from tierstore.nn.table_files import export_table, load_table
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStats, RowStore, seed_of
from tierstore.torch_private import innermost_transform
from tierstore.uncompiled import uncompiled
from tierstore.units import parse_bytes

_log = logging.getLogger("tierstore")


@dataclass(frozen=True)
class TableStats:
    """What a table did.

    Attributes:
        num_embeddings: its rows.
        lookups: calls of the module.
        ids: that these named.
        rows: distinct ones of each call, added up.
        row_store: what lies below.
    """

    num_embeddings: int
    lookups: int
    ids: int
    rows: int
    row_store: RowStats


class EmbeddingTable(nn.Module):
    """Rows by their ids, as ``nn.Embedding`` and ``nn.EmbeddingBag`` have them, in tables of any size.

    A batch brings its distinct rows, and a row that was never looked up costs nothing.  ``weight`` is one
    parameter of shape ``[num_embeddings, embedding_dim]`` without bytes of its own; its gradient is what
    PyTorch's modules give, in indices, values and their order.  `tierstore.optim` steps it.

    Args:
        num_embeddings: how many rows, at least 1.
        embedding_dim: elements of a row, at least 1.
        target: ``"cpu"`` or ``"device"``, in any case of letters: where a batch's rows are computed with, in
            a run.  Without ``cache_rows`` they are looked up on the host, and brought to the device.
        cache_rows: rows that are kept on the device, with their state, in a run with ``target="device"``.
        max_norm: longer rows are scaled down to it as they are looked up, differentiably; the table is not
            written, other than by ``nn.Embedding``.
        mode: ``None``: each id gives a row; ``"sum"`` and ``"mean"``: each bag of ids does.
        sparse: ``False``: ``weight.grad`` is dense; only with ``target="device"``.
        dtype: float32, float64, bfloat16 or float16.
        init: what rows are at first: ``None`` for N(0, 1); a number; ``"zeros"``; `Normal`, `Uniform`; or a
            function from ids (int64 ``[n]``) to rows (``[n, embedding_dim]``), the same for the same id.
        seed: of ``init``, from 0 to 2**64 - 1; ``None``: one is drawn, so ``torch.manual_seed`` decides,
            and two tables differ.  A run that goes on from a checkpoint goes on with that one's.
        out_of_range: ``"error"``, or ``"zeros"``: ids that are negative or too large give a row of zeros,
            without gradient.
        policy: ``"lfu"`` or ``"lru"``: which rows leave the cache.

    Raises:
        TypeError: an argument is of a wrong type.
        ConfigError: one is out of its range, or two do not go together.
        CapacityError: with ``sparse=False``: a gradient of all rows does not fit into memory.
    """

    weight: TableWeight

    def __init__(  # noqa: PLR0913 - each by its name
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        target: str = "cpu",
        cache_rows: int = 0,
        max_norm: float | None = None,
        mode: str | None = None,
        sparse: bool = True,
        dtype: torch.dtype = torch.float32,
        init: Initializer = None,
        seed: int | None = None,
        out_of_range: str = "error",
        policy: str = "lfu",
    ) -> None:
        super().__init__()
        arguments = TableArguments(
            num_embeddings, embedding_dim, lowered(target), cache_rows, max_norm, mode, sparse, dtype, seed,
            out_of_range, policy,
        )  # fmt: skip
        self.embedding_dim = embedding_dim
        self.target = arguments.target
        self.cache_rows = min(cache_rows, num_embeddings)
        if cache_rows > num_embeddings:
            _log.info("cache_rows=%d: all %d rows of the table", cache_rows, num_embeddings)
        self.max_norm = max_norm
        self.mode = mode
        self.sparse = sparse
        self.out_of_range = out_of_range
        self.policy = policy
        initial_rows = rows_of(init, embedding_dim, dtype, seed)
        self.weight = TableWeight(
            RowStore(num_embeddings, embedding_dim, dtype, initial_rows, name="EmbeddingTable")
        )
        if not sparse:
            check_room(self.weight.row_store, "grad")
        self._lookups = self._ids = self._rows = 0

    @property
    def num_embeddings(self) -> int:
        """How many rows there are."""
        return self.weight.shape[0]

    @property
    def seed(self) -> int | None:
        """What its rows are made from; ``None``: ``init`` needs none."""
        return seed_of(self.weight.row_store.initial_rows)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.weight.dtype

    @uncompiled  # there is nothing in it to compile
    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look rows up.

        Args:
            ids: int64 or int32, on any device; with a mode 2-D, or 1-D with ``offsets``.
            offsets: where each bag begins, from 0, ascending.
            per_sample_weights: for ``"sum"``: what each row is multiplied by; of the shape of ``ids``.

        Returns:
            on the device of ``ids``: ``[*ids.shape, embedding_dim]``, or ``[bags, embedding_dim]``.

        Raises:
            IndexError: an id is out of range.
            TypeError: ids or offsets are of another type.
            ConfigError: arguments do not go together, or offsets are none.
            UsageError: a transform of ``torch.func``, or ``torch.jit.trace``, goes through it.
        """
        self._require_lookup()
        known = ids_of.checked(ids)
        begins = self._checked_bags(known, offsets, per_sample_weights)
        distinct = ids_of.distinct(
            known, self.num_embeddings, self._name, takes_strangers=self.out_of_range == "zeros"
        )
        is_saved = self.max_norm is not None or per_sample_weights is not None
        rows = gather(self.weight, distinct, self.sparse, is_saved=is_saved)
        if self.max_norm is not None:
            rows = clipped(rows, self.max_norm)
        self._lookups += 1
        self._ids += known.numel()
        self._rows += len(distinct.ids)
        return self._embedded(distinct.inverse, rows, begins, per_sample_weights).to(ids.device)

    def _require_lookup(self) -> None:
        """Raise where PyTorch would make something else of a lookup, or it would come too late."""
        through = _not_through()
        if through is not None:
            raise UsageError(
                f"table {self._name!r}: {through} cannot go through a lookup. Look the rows up before, and "
                "take what is done with them."
            )
        if not isinstance(self.weight, TableWeight):
            raise UsageError("weight was replaced: a table looks up its own rows only")
        if self.weight.requires_grad:
            require_in_time(self._name, "is looked up")

    def _embedded(
        self,
        places: torch.Tensor,
        rows: torch.Tensor,
        begins: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what PyTorch's own module makes of the batch's rows, by their places.

        Args:
            places: of the row of each id; in host memory, as ``begins``.
            rows: distinct ones, where the table is computed with.
            begins: where each bag begins; ``None``: there are none, or they are 2-D.
            per_sample_weights: see `forward`.
        """
        store, is_sparse = self.weight.row_store, self.sparse and self.max_norm is None
        places = on_device_of(store, places)
        if self.mode is None:
            return functional.embedding(places, rows, sparse=is_sparse)
        by = None if per_sample_weights is None else per_sample_weights.to(rows.device)
        begins = None if begins is None else on_device_of(store, begins)
        return functional.embedding_bag(
            places, rows, begins, mode=self.mode, sparse=is_sparse, per_sample_weights=by
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return copies of rows, as they are, outside of autograd.

        Args:
            ids: int64 or int32, of any shape.

        Returns:
            ``[*ids.shape, embedding_dim]`` in host memory.

        Raises:
            IndexError: an id is out of range, unless ``out_of_range="zeros"``.
            TypeError: ids are of another type.
        """
        if self.weight.requires_grad:
            require_in_time(self._name, "is read")
        known = ids_of.checked(ids)
        distinct = ids_of.distinct(
            known, self.num_embeddings, self._name, takes_strangers=self.out_of_range == "zeros"
        )
        access = self.weight.rows_for("is read")
        return access.read(distinct.ids, int(distinct.has_strangers))[distinct.inverse]

    def set_rows(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows; of an id that is there several times, the last one stays.

        Args:
            ids: int64 or int32, ``[n]``.
            values: ``[n, embedding_dim]``, of any type of numbers and on any device.

        Raises:
            IndexError: an id is out of range; nothing was changed.
            TypeError: ids are of another type.
            ConfigError: the shapes do not fit.
        """
        known = ids_of.in_range(ids_of.checked(ids), self.num_embeddings, self._name)
        wanted = (known.numel(), self.embedding_dim)
        if known.ndim != 1 or tuple(values.shape) != wanted:
            raise ConfigError(
                f"set_rows: ids of shape {list(known.shape)} with values of {list(values.shape)}; they have "
                f"to be [n] and [n, {self.embedding_dim}]"
            )
        self.weight.rows_for("is written").write(known, values)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Begin to bring what a coming batch will look up: advice, which never fails for want of room.

        Args:
            ids: int64 or int32, of any shape; those out of range are left out.

        Raises:
            TypeError: ids are of another type.
        """
        known = ids_of.checked(ids).reshape(-1)
        store = self.weight.rows_for("is prefetched").store
        store.prefetch(own_of(store, known[(known >= 0) & (known < self.num_embeddings)]))

    def grow(self, num_embeddings: int) -> None:
        """Have more rows: those that a table made with so many has.  ``weight`` stays the same object.

        Raises:
            TypeError: it is no int.
            ConfigError: it is less than there are.
            UsageError: ``weight.grad`` is set: it is of the shape that the table had.
            CapacityError: as where the table is made.
        """
        if isinstance(num_embeddings, bool) or not isinstance(num_embeddings, int):
            raise TypeError(f"grow({num_embeddings!r}): it takes an int")
        if num_embeddings < self.num_embeddings:
            raise ConfigError(f"grow({num_embeddings}): table {self._name!r} has {self.num_embeddings} rows")
        if self.weight.grad is not None:
            raise UsageError(
                f"grow({num_embeddings}): table {self._name!r} has a gradient of {self.num_embeddings} rows; "
                "step it, or set it to None"
            )
        access = self.weight.rows_for("grows")
        if not self.sparse:
            check_room(access.store, "grad", num_embeddings)
        access.grow(num_embeddings)
        self.weight.grow(num_embeddings)

    def export(
        self,
        path: str | Path,
        *,
        format: str = "npy",  # noqa: A002 - as others call it
        shard_bytes: int | str = "1GB",
        state: bool = False,
    ) -> None:
        """Write the rows to files, in the order of their ids, a few megabytes at a time.

        Args:
            path: of a new directory, which is there as a whole or not at all.
            format: ``"npy"``, which has no bfloat16, or ``"safetensors"``.
            shard_bytes: what a file comes to at most, as a number or as text; at least a row.
            state: whether to write what an optimizer keeps beside the rows, too; its step count is in its
                ``state_dict``.

        Raises:
            ConfigError: the format is unknown, or the size is none.
            UsageError: the directory is there and not empty, or the format has not the table's type.
            BackendError: the file system failed; nothing is left there.
        """
        store, largest_bytes = self.weight.row_store, parse_bytes(shard_bytes)
        access = self.weight.access
        with access.exporting() as is_mine:
            if is_mine:
                export_table(store, Path(path), format, largest_bytes, state, access.blocks)

    def load(self, path: str | Path, *, state: bool = False) -> None:
        """Read the rows from files, a few megabytes at a time.

        Args:
            path: of a directory that `export` has written, or of one ``.npy`` or safetensors file with
                a matrix of the table's shape and type.
            state: whether to read what an optimizer keeps beside the rows, too.

        Raises:
            UsageError: they cannot be read, or shape or type are not the table's; nothing was changed.
            BackendError: a file could not be read any more; rows before that are changed.
        """
        if state:
            self.weight.begun_for = None
        access = self.weight.rows_for("is loaded")
        with self.weight.loading() as store:
            load_table(store, Path(path), state, access.begin_load)

    def stats(self) -> TableStats:
        """Return what it did so far."""
        return TableStats(
            self.num_embeddings, self._lookups, self._ids, self._rows, self.weight.row_store.stats()
        )

    def extra_repr(self) -> str:
        """See PyTorch."""
        more = [f"mode={self.mode!r}"] if self.mode is not None else []
        more += [f"max_norm={self.max_norm}"] if self.max_norm is not None else []
        more += [] if self.sparse else ["sparse=False"]
        return ", ".join([f"{self.num_embeddings}, {self.embedding_dim}, target={self.target!r}", *more])

    @property
    def _name(self) -> str:
        return self.weight.table_name

    def _checked_bags(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the offsets as they have to be."""
        if per_sample_weights is not None:
            self._check_weights(ids, per_sample_weights)
        if self.mode is None:
            if offsets is not None:
                raise ConfigError("offsets are for mode='sum' and mode='mean'; this table has mode=None")
            return None
        if ids.ndim == 2 and offsets is None:
            return None
        if ids.ndim != 1 or offsets is None:
            given = "without offsets" if offsets is None else "with offsets"
            raise ConfigError(f"ids of shape {list(ids.shape)} {given}: bags are 2-D, or 1-D with offsets")
        return ids_of.checked_offsets(offsets, len(ids))

    def _check_weights(self, ids: torch.Tensor, per_sample_weights: torch.Tensor) -> None:
        if self.mode != "sum":
            raise ConfigError(f"per_sample_weights are for mode='sum'; this table has mode={self.mode!r}")
        given = per_sample_weights.dtype, per_sample_weights.shape
        if given != (self.dtype, ids.shape):
            raise ConfigError(
                f"per_sample_weights are {given[0]} {list(given[1])}; they have to be {self.dtype} "
                f"{list(ids.shape)}, as the table and its ids"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Stay in host memory, whichever device the module is moved to.

        Raises:
            UsageError: the type of its elements would change, or they would be shared with other processes.
        """
        del recurse
        probe = torch.zeros(1, dtype=self.dtype, device="cpu")
        with torch.no_grad():
            made = fn(probe)
        if made.dtype != self.dtype:
            raise UsageError(
                f"table {self._name!r} is of {self.dtype} and cannot become {made.dtype}: set dtype= where "
                "it is made"
            )
        if probe.is_shared():
            raise UsageError(f"table {self._name!r} cannot be shared with other processes")
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Write what is loaded to the rows, also with ``assign=True``: a table has no tensor to be given."""
        super()._load_from_state_dict(
            state_dict, prefix, {**local_metadata, "assign_to_params_buffers": False}, strict, missing_keys,
            unexpected_keys, error_msgs,
        )  # fmt: skip


def _not_through() -> str | None:
    """Name what PyTorch makes of a call beside running it, if it does."""
    if innermost_transform() is not None:
        return "a transform of torch.func"
    is_tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    return "torch.jit.trace" if is_tracing else None
