"""Convert a ``torch_dist`` checkpoint to another optimizer type: new metadata, the same data files."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from nemo_optim_bridge.core.groups import HYPERPARAMETERS, identify
from nemo_optim_bridge.core.health import require_warm
from nemo_optim_bridge.core.publish import check_output, new_directory
from nemo_optim_bridge.core.receipt import FILE_NAME as RECEIPT_NAME
from nemo_optim_bridge.core.receipt import encode, make_receipt
from nemo_optim_bridge.core.regroup import has_expert_groups
from nemo_optim_bridge.core.team import Progress, Team, Workers, ignore
from nemo_optim_bridge.errors import OutputError, ParamGroupError, TargetError
from nemo_optim_bridge.formats.documents import read_json
from nemo_optim_bridge.formats.torch_dist.common_file import CommonFile, opaque_classes
from nemo_optim_bridge.formats.torch_dist.containers import model_prefix, rewrap, target_prefix
from nemo_optim_bridge.formats.torch_dist.crcs import require_valid_crcs
from nemo_optim_bridge.formats.torch_dist.document import Document
from nemo_optim_bridge.formats.torch_dist.link import check_link, link_file
from nemo_optim_bridge.formats.torch_dist.membership import Rule
from nemo_optim_bridge.formats.torch_dist.metadata import Moved, renamed_metadata
from nemo_optim_bridge.formats.torch_dist.proof import Proof
from nemo_optim_bridge.formats.torch_dist.reader import TorchDist, read_with_document
from nemo_optim_bridge.formats.torch_dist.remainders import Rounding, find_ties
from nemo_optim_bridge.formats.torch_dist.rename import Spelling, new_names, resolve_chained_prefix
from nemo_optim_bridge.formats.torch_dist.retarget import TargetOptimizer, optimizer_state, retarget
from nemo_optim_bridge.formats.torch_dist.saved import (
    CONTAINERS,
    DISTRIBUTED,
    KINDS,
    LIGHTNING,
    MEGATRON,
    MEGATRON_KINDS,
    SavedOptimizer,
    read_saved,
)
from nemo_optim_bridge.formats.torch_dist.states import States, check_bytes, read_states

_REWRITTEN: Final = frozenset({".metadata", "common.pt"})
_LINKED: Final = {
    "reflink": "data files are reflinked: shared with the source until one of them is written to",
    "hard": "data files are hard-linked: the same files under a second name, so that changing one changes the other",
    "copy": "data files were copied: the file system can neither reflink nor hard-link them",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose.

    ``key_style`` is for distributed_fused_adam, ``chained_prefix`` and ``torch_adam`` for megatron-core's optimizers.
    ``container`` and ``target_ep`` None mean: as in the source. ``no_decay`` are patterns of the names of parameters
    without weight decay; empty means the default rule of the source's framework. ``receipt`` reads and hashes all
    data, checks their CRCs unless ``check_crcs`` is False, and refuses a cold optimizer unless ``allow_cold``; without
    it no tensor's data are read.
    """

    to: str
    key_style: str = "both"
    container: str | None = None
    target_ep: int | None = None
    no_decay: tuple[str, ...] = ()
    exact_remainders: bool = False
    chained_prefix: str = "auto"
    torch_adam: bool = False
    scheduler_state: Path | None = None
    link: str = "auto"
    receipt: bool = True
    check_crcs: bool = True
    allow_cold: bool = False
    overwrite: bool = False
    fsync: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A conversion that was planned from headers alone. ``run`` does it."""

    source: TorchDist
    document: Document
    saved: SavedOptimizer
    states: States
    target: TargetOptimizer
    names: Mapping[str, tuple[str, ...]]
    common: bytes
    out: Path
    options: Options
    sizes: Mapping[str, int]
    remarks: list[str]
    rule: Rule
    container: str

    def summary(self) -> dict[str, Any]:
        """Return the plan in numbers, under the field names of ``--json``."""
        shapes = self.states.shapes
        return {
            "source": self.source.path,
            "output": str(self.out),
            "source_optimizer": self.saved.kind,
            "target_optimizer": self.target.kind,
            "container": self.container,
            "step": self.target.step,
            "num_parameters": len(shapes),
            "num_elements": sum(map(prod, shapes.values())),
            "keys": {"source": len(self.names), "target": sum(map(len, self.names.values()))},
            "bytes_shared": sum(self.sizes.values()),
            "weight_decay_rule": str(self.rule),
            "param_groups": [
                {**_shown(group), "from_group": j}
                for group, j in zip(self.target.groups, self.target.partner, strict=True)
            ],
            "remarks": list(self.remarks),
            "problems": [],
        }

    def run(
        self, team: Team | None = None, progress: Callable[[str, int], Progress] = lambda stage, total: ignore
    ) -> dict[str, Any]:
        """Write the target beside its name and rename it into place; called by one process.

        Args:
            team: worker processes that share the reading, for the receipt and exact remainders. None is this process
                alone.
            progress: called with the stage's name and its bytes; what it returns is called with bytes done.

        Return what was found on the way: with a receipt, the source's digests and what is wrong with its values.
        Raises one BridgeError; the source is untouched and the output absent then.
        """
        root, team = Path(self.source.path), team or Workers(1)
        before = _identities(root, self.sizes)
        if self.options.receipt and self.options.check_crcs:
            require_valid_crcs(root, self.source.places(), team, progress)
        proof = Proof.of(root, self.rule, team, progress) if self.options.receipt else None
        if proof is not None and not self.options.allow_cold:
            require_warm(proof.surveyed.findings, root)
        with new_directory(self.out, overwrite=self.options.overwrite, fsync=self.options.fsync) as folder:
            moved: Moved = {}
            if self.options.exact_remainders:
                rounding: Rounding = find_ties(self.source, self.states, team, progress)
                moved = rounding.write(folder, self.options.fsync)
                self.remarks.append(rounding.remark())
            metadata = renamed_metadata(self.document, lambda key: self.names.get(key, (key,)), moved)
            ways = self._link(root, folder)
            self.remarks.extend(_LINKED[way] for way, _ in ways.most_common())
            _write(folder / "common.pt", self.common, self.options.fsync)
            _write(folder / ".metadata", metadata, self.options.fsync)
            if proof is not None:
                prefix = model_prefix(tuple(self.states.shapes))
                proof = proof.carried_to(folder, {fqn.removeprefix(prefix) for fqn, _ in moved}, team)
                _write(folder / RECEIPT_NAME, encode(self._receipt(proof)), self.options.fsync)
            if _identities(root, self.sizes) != before:
                raise OutputError("the source changed while it was converted", path=root, hint="run it again")
        return {} if proof is None else proof.found()

    def _receipt(self, proof: Proof) -> dict[str, Any]:
        expert_groups = has_expert_groups(self.target.groups)
        receipt = make_receipt(
            proof.source, proof.surveyed,
            target={
                "framework": proof.source.framework, "layout": self.target.kind, "container": self.container,
                "topology": {"expert_groups": expert_groups},
            },
            vocab_size=None, replicas=0, remarks=[*proof.source.remarks, *self.remarks],
        )  # fmt: skip
        receipt["source"]["container"] = self.saved.container
        return receipt

    def _link(self, root: Path, folder: Path) -> Counter[str]:
        """Bring every other file of the source into ``folder``; return how often in which way."""
        ways: Counter[str] = Counter()
        for name in _files(root):
            if name in _REWRITTEN or name == RECEIPT_NAME:  # a receipt of the source is no longer true
                continue
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"cannot be written: {error.strerror}", path=target.parent) from error
            is_data = name in self.sizes or name.endswith(".distcp")
            way = link_file(root / name, target, self.options.link if is_data else "copy")
            ways.update([way] if is_data else [])
        return ways


def plan_convert(path: Path, out: Path, options: Options) -> Conversion:
    """Plan a conversion from headers alone; raises BridgeError with every reason why it is not possible."""
    check_output(out, (path,), overwrite=options.overwrite)
    _check_options(options)
    with _collector_paused():
        return _plan(path, out, options)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cycle collector: it would walk again and again over millions of objects that are in no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(path: Path, out: Path, options: Options) -> Conversion:
    source, document = read_with_document(path)
    saved = read_saved(source.common, (*source.tensors, *source.objects), source.path)
    container = options.container or saved.container
    if container == MEGATRON and options.to not in MEGATRON_KINDS:
        raise TargetError(
            f"{options.to} is NeMo's, which reads Lightning's container only",
            path=path,
            hint="add --container lightning",
        )
    states = read_states(source)
    sizes = check_bytes(source)
    shapes = states.shapes
    rule = Rule.of(saved.kind, options.no_decay)
    try:
        target = retarget(saved, options.to, rule.members(shapes), options.target_ep)
    except ParamGroupError as error:
        raise ParamGroupError(
            error.problem, path=path,
            hint=f"groups were told apart by this rule: {rule}; give the one of the run with --no-decay PATTERN; "
            "experts keep groups of their own with a --target-ep above 1",
        ) from error  # fmt: skip
    remarks = [*target.remarks, *_rule_remarks(saved, options, rule, shapes)]
    prefix = model_prefix(tuple(shapes))
    chained_prefix = resolve_chained_prefix(options.chained_prefix, container)
    spelling = Spelling(
        options.key_style, chained_prefix, prefix, target_prefix(saved.container, container, prefix)
    )  # fmt: skip
    names = new_names(source, states, target, spelling)
    extras, lost = _extras(saved, target)
    remarks += lost
    if states.from_weights:
        remarks.append(f"{len(states.from_weights)} float32 parameters have no master: their weight is it, exactly")
    common = CommonFile(Path(source.path))
    tree, more = rewrap(
        common.tree, optimizer_state(target, extras, step_in_state=options.torch_adam), target, saved.container,
        container, num_saved=len(saved.groups), avoid_prefix=chained_prefix == "no", path=source.path,
        scheduler=read_json(options.scheduler_state).data if options.scheduler_state else None,
    )  # fmt: skip
    remarks += more
    if classes := opaque_classes(tree):
        remarks.append(f"objects of {', '.join(classes[:6])} in common.pt are kept unopened")
    return Conversion(
        source, document, saved, states, target, names, common.dumps(tree), out, options, sizes, remarks, rule,
        container,
    )  # fmt: skip


def convert(path: Path, out: Path, options: Options) -> dict[str, Any]:
    """Convert a checkpoint and return the summary; raises BridgeError, and then nothing was written."""
    planned = plan_convert(path, out, options)
    found = planned.run()
    return {**planned.summary(), **found}


def _check_options(options: Options) -> None:
    check_link(options.link)
    if options.to not in KINDS:
        raise TargetError(f"unknown optimizer {options.to!r}", hint=f"choose one of {', '.join(KINDS)}")
    if options.container is not None and options.container not in CONTAINERS:
        raise TargetError(f"unknown container {options.container!r}", hint=f"choose {' or '.join(CONTAINERS)}")
    if options.exact_remainders and options.to != DISTRIBUTED:
        raise TargetError(f"--exact-remainders is for {DISTRIBUTED}: {options.to} keeps whole masters")
    if options.scheduler_state is not None and options.container == LIGHTNING:
        raise TargetError("--scheduler-state is for Megatron-LM's container", hint="add --container megatron")


def _rule_remarks(
    saved: SavedOptimizer, options: Options, rule: Rule, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Say which parameters another framework's default rule treats otherwise: no checkpoint can change that."""
    usual = Rule.of(options.to, ())
    differ = [fqn for fqn, shape in shapes.items() if rule.decays(fqn, shape) != usual.decays(fqn, shape)]
    if not differ or (options.to in MEGATRON_KINDS) == saved.is_megatron:
        return []
    here, there = ("", "no ") if rule.decays(differ[0], shapes[differ[0]]) else ("no ", "")
    return [
        f"{len(differ)} parameters ({differ[0]}, ...) have {here}weight decay by the rule used here, and would have "
        f"{there}weight decay by {usual.origin}: let the run group them as here, or it changes"
    ]


def _extras(
    saved: SavedOptimizer, target: TargetOptimizer
) -> tuple[dict[int, Mapping[str, Any]], list[str]]:  # fmt: skip
    """Return the state's other fields for every chained optimizer of the target, and what is lost of them."""
    fields: dict[str, Any] = {}
    for part in saved.extras.values():
        fields.update(part)
    if not fields:
        return {}, []
    if (target.kind in MEGATRON_KINDS) == saved.is_megatron:
        return {number: fields for number in set(target.chain)}, []
    return {}, [f"lost, since {target.kind} has no place for it: {', '.join(sorted(map(str, fields)))}"]


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    identity = identify(group)
    shown = {name: group[name] for name in HYPERPARAMETERS if name in group}
    return {**shown, "decays": identity.decays, "expert": identity.expert}


def _files(root: Path) -> list[str]:
    """Return all regular files of a checkpoint, relative to it."""
    found = []
    for folder, _, names in os.walk(root):
        paths = (Path(folder) / name for name in names)
        found += [str(path.relative_to(root)) for path in paths if path.is_file()]
    return sorted(found)


def _identities(root: Path, sizes: Mapping[str, int]) -> list[tuple[int, int, int]]:
    stats = [(root / name).stat() for name in (*sorted(sizes), *sorted(_REWRITTEN))]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in stats]


def _write(path: Path, data: bytes, fsync: bool) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path=path) from error
