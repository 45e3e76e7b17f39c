"""Joining the others, at the beginning of ``offload(...)``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import psutil
import torch
from torch import nn

from tierstore.config import OffloadConfig, StoreConfig, machine
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.store import Store
from tierstore.training import processes
from tierstore.training.checkpoints.agreement import Agreement
from tierstore.training.modules import replicas
from tierstore.training.ranks.averaging import GradientAverages
from tierstore.training.ranks.beginnings import agree_on_beginnings
from tierstore.training.ranks.checkpoints import AgreedCheckpoints
from tierstore.training.ranks.introductions import Introduction, judge, locals_of
from tierstore.training.ranks.meeting import Meeting
from tierstore.training.ranks.sharded_tables import ShardedTables
from tierstore.training.ranks.shares import directory_of, roots_of, share_of
from tierstore.training.ranks.where import RankPlace, here
from tierstore.training.sharding.refusals import refuse_for_shards
from tierstore.training.tables.found_tables import Tables, refuse_dense_gradients
from tierstore.units import format_bytes, parse_bytes

log = logging.getLogger("tierstore")

_SHARED = ("offload_cpu_size", "offload_disk_size")
_OF_EACH = ("offload_path",)  # what may be another one in each process


class Ranks:
    """This process among those that train with it.

    Args:
        where: which one it is.
        local: how many share its machine's quotas.
        given: the configuration, of the machine.
        meeting: of all of them; ``None``: there is no process group.

    Attributes:
        where: which one it is.
        settings: its own configuration: its shares, and its own directories.
        meeting: of all of them; ``None``: there is no process group.

    Raises:
        ConfigError: a share would be nothing, or the directory is another process's.
    """

    def __init__(self, where: RankPlace, local: int, given: OffloadConfig, meeting: Meeting | None) -> None:
        self.where = where
        self.settings = share_of(given, where, local)
        self.meeting = meeting
        self._local = local
        self._given = given
        self._averages: GradientAverages | None = None
        self._tables: ShardedTables | None = None

    def named(self, config: StoreConfig) -> StoreConfig:
        """Return tiers whose messages say that the quota which bounds them is shared."""
        if self._local == 1:
            return config
        shared = f", which the {self._local} processes of this machine share"
        tiers = [
            replace(tier, setting=tier.setting + shared)
            if tier.setting is not None and tier.name != "device"
            else tier
            for tier in config.tiers
        ]
        return replace(config, tiers=tiers)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Let an error for want of room say, inside the context, which part of the whole there was."""
        try:
            yield
        except CapacityError as error:
            error.add_note(self.in_words())
            raise

    def in_words(self) -> str:
        """Return which process this is and what it has."""
        disk_bytes = parse_bytes(self.settings.offload_disk_size or 0)
        return (
            f"{self.where.name}, one of {self._local} on this machine, has "
            f"{format_bytes(parse_bytes(self.settings.offload_cpu_size or 0))} of host memory"
            f"{_of(self._given.offload_cpu_size)} and {format_bytes(disk_bytes)} of disk"
            f"{_of(self._given.offload_disk_size)}, in {', '.join(roots_of(self.settings))}"
        )

    def agreement(self, store: Store, *, is_resumed: bool) -> Agreement:
        """Agree with the others about the checkpoint that all go on from, and about those to come.

        Args:
            store: the process's own; durable.
            is_resumed: whether training goes on from one, if there is one.

        Raises:
            UsageError: see `AgreedCheckpoints.settle_former`.
            TierStoreError: another process has ended.
        """
        assert self.meeting is not None  # who has none is not durable
        agreed = AgreedCheckpoints(self.where, self.meeting, store)
        if is_resumed:
            agreed.settle_former()
        return agreed

    def spread(self, model: nn.Module, tables: Tables) -> ShardedTables:
        """Decide with the others that each has a part of the rows of all tables.

        Args:
            model: that is offloaded.
            tables: its tables; at least one.

        Raises:
            UsageError: there is no process group, optimizer_in_backward is set, they have other tables, or
                one has dense gradients.
            TierStoreError: another process has ended.
        """
        if self.meeting is None:
            raise UsageError(
                f"the model has tables ({', '.join(map(repr, list(tables.values())[:3]))}), whose rows are "
                "spread over the processes, and the process group is not initialised. Call "
                "torch.distributed.init_process_group before offload(...)."
            )
        if self.settings.optimizer_in_backward:
            raise UsageError(
                f"optimizer_in_backward steps each parameter during backward, and the gradients of tables "
                f"({', '.join(map(repr, list(tables.values())[:3]))}) are averaged over the processes at its "
                "end: rows would be stepped with the gradients of one process alone. Leave "
                "optimizer_in_backward out."
            )
        beginnings = agree_on_beginnings(self.where, self.meeting, model, tables)
        refuse_dense_gradients(model)
        self._tables = ShardedTables(self.where, tables, beginnings, self._local)
        return self._tables

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate."""
        with contextlib.ExitStack() as pauses:
            for each in (self._averages, self._tables):
                if each is not None:
                    pauses.enter_context(each.paused())
            yield

    def average_gradients(
        self, model: nn.Module, device: torch.device, stash: Callable[[torch.Tensor], None]
    ) -> GradientAverages:
        """Average gradients from now on, after all have the first process's parameters and buffers.

        Args:
            model: that is trained.
            device: where it computes.
            stash: told of a parameter that has got the gradient of others alone.

        Raises:
            UsageError: see `GradientAverages`; or there is no process group, they are averaged already, or
                ``fully_shard`` has sharded the model.
        """
        if self.meeting is None:
            raise UsageError(
                "gradients are averaged over the process group, which was not initialised when offload(...) "
                "was called. Call torch.distributed.init_process_group before."
            )
        refuse_for_shards(model, "run.average_gradients()", "it reduces gradients by itself")
        if self._averages is not None or replicas.wrappers_in(model, device):
            raise UsageError(
                "gradients are averaged already: by DistributedDataParallel, or an earlier call."
            )
        ordinary = {name: p for name, p in model.named_parameters() if not isinstance(p, TableWeight)}
        trained = {name: each for name, each in ordinary.items() if each.requires_grad}
        averages = GradientAverages(self.where, self.meeting, trained, device, stash)
        averages.send_values({**ordinary, **dict(model.named_buffers())})
        self._averages = averages
        return averages

    def leave_with(self, error: BaseException) -> None:
        """Let the others know that an error ends the run: whoever waits for rows of its tables raises."""
        if self._tables is not None:
            self._tables.leave_with(error)

    def close(self) -> None:
        """Meet no more.  Idempotent."""
        if self._averages is not None:
            self._averages.remove()
        if self._tables is not None:
            self._tables.close()
        if self.meeting is not None:
            self.meeting.close()


def _of(given: int | str | None) -> str:
    return " of what is free" if given is None else f" of {format_bytes(parse_bytes(given))}"


def join(config: OffloadConfig, more: Mapping[str, object]) -> Ranks:
    """Meet the other processes, and find out what this one may have.  Blocks until all have come.

    Where there is no process group yet, torchrun's variables say which process this is, and nobody is met.

    Args:
        config: of the machine.
        more: what else has to be the same in all processes, by its name; compared by its ``repr``.

    Raises:
        ConfigError: they differ, or what they are given does not suffice; all of them raise the same.
        UsageError: there is no process group, and checkpoints are to be made.
        TierStoreError: another process has ended.
    """
    where = here()
    if not processes.has_group():
        return _alone(where, config)
    meeting = Meeting(where)
    try:
        all_of_them = meeting.exchange(_introduce(where, config, more), "offload(...)")
        judge(all_of_them)
        local = locals_of(all_of_them)[where.rank]
        ranks = Ranks(where, local, config, meeting)
        first = min(each.where.rank for each in all_of_them if each.where.machine == where.machine)
        _say(ranks, config, is_first=first == where.rank)
    except BaseException:
        meeting.close()
        raise
    return ranks


def _alone(where: RankPlace, config: OffloadConfig) -> Ranks:
    if config.durable:
        raise UsageError(
            f"this is {where.name}, and durable is set: which checkpoint all of them have is asked over the "
            "process group, which is not initialised. Call torch.distributed.init_process_group before "
            "offload(...)."
        )
    log.warning(
        "the process group is not initialised: whether the %d processes have the same configuration was not "
        "compared. Call torch.distributed.init_process_group before offload(...).",
        where.world_size,
    )
    assert where.told_local is not None  # who has no group was told by torchrun
    ranks = Ranks(where, where.told_local, config, None)
    _say(ranks, config, is_first=False)
    return ranks


def _introduce(where: RankPlace, config: OffloadConfig, more: Mapping[str, object]) -> Introduction:
    given = {key: repr(value) for key, value in config.to_mapping().items() if key not in _OF_EACH}
    given["device"] = repr(None if config.device is None else config.device.partition(":")[0])
    given |= {name: repr(value) for name, value in more.items()}
    sizes = {key: getattr(config, key) for key in _SHARED}
    quotas = {key: parse_bytes(size) for key, size in sizes.items() if size is not None}
    return Introduction(where, given, quotas, int(psutil.virtual_memory().total), _fault(where, config))


def _fault(where: RankPlace, config: OffloadConfig) -> str:
    """Return what is wrong with what this process was given; "": nothing."""
    try:
        for root in roots_of(config):
            directory_of(root, where)
    except ConfigError as fault:
        return str(fault)
    return ""


def _say(ranks: Ranks, config: OffloadConfig, *, is_first: bool) -> None:
    log.info("%s", ranks.in_words())
    if not is_first:
        return
    if config.offload_disk_size is not None:
        machine.say_if_disks_are_smaller(parse_bytes(config.offload_disk_size), *roots_of(config))
    if config.offload_cpu_size is not None:
        available_bytes = machine.available_host_bytes()
        if parse_bytes(config.offload_cpu_size) > available_bytes:
            log.warning(
                "offload_cpu_size is %s for the processes of this machine, which has %s available now",
                format_bytes(parse_bytes(config.offload_cpu_size)),
                format_bytes(available_bytes),
            )
