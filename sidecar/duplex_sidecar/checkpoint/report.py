"""A complete account of what a checkpoint lacks, has too much of, or has in another shape.

Made before any stage starts, from headers alone (milliseconds, torch-free), so that a wrong
checkpoint is one readable list and not the first exception of one of four processes.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from duplex_sidecar.checkpoint.config import CheckpointConfig, read_config
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import (
    TensorHeader,
    read_index,
    read_safetensors_header,
    read_state_dict_header,
)
from duplex_sidecar.checkpoint.layout import (
    INDEX_NAME,
    VOICES_FOLDER,
    WEIGHTS_NAME,
    Shape,
    asset_shapes,
    optional_names,
    weight_shapes,
)
from duplex_sidecar.checkpoint.layout_front_end import FRONT_END_NAMES, check_front_end
from duplex_sidecar.checkpoint.tokenizer import read_tokenizer
from duplex_sidecar.checkpoint.voice_format import VOICE_SUFFIX, check_voice_header

FLOATING_TYPES = frozenset({"F32", "BF16", "F16", "Float", "BFloat16", "Half"})
"""Safetensors' and torch's spellings of what a stage can load."""


class Problem(StrEnum):
    MISSING = "missing"
    UNEXPECTED = "unexpected"
    MISSHAPED = "misshaped"
    WRONG_TYPE = "wrong_type"
    BAD_FILE = "bad_file"
    """The file itself is absent, damaged or not what its name says."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. `name` is a tensor, or "" when it is about the file."""

    file: str
    name: str
    problem: Problem
    detail: str


class CheckpointReport(msgspec.Struct, frozen=True):
    """What was found. `tensors` counts all tensors seen, in all files."""

    path: str
    files: tuple[str, ...]
    tensors: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What is not there and need not be."""

    @property
    def complete(self) -> bool:
        return not self.findings


def make_report(folder: Path) -> CheckpointReport:
    """Look at every file of a checkpoint. Raises CheckpointError only when config.json is absent
    or wrong, since nothing can be expected then."""
    config = read_config(folder)
    findings: list[Finding] = []
    files: list[str] = []
    tensors = _check_weights(folder, config, files, findings)
    for path, expected in asset_shapes(config).items():
        try:
            found = read_state_dict_header(folder / path)
        except CheckpointError as error:
            findings.append(_bad_file(str(path), error))
            continue
        files.append(str(path))
        tensors += len(found)
        findings += _compare({str(path): found}, expected, frozenset(), str(path))
    notes = _check_front_end(folder, config, files, findings)
    tensors += _check_voices(folder, config, files, findings)
    try:
        tokenizer = read_tokenizer(folder)
    except CheckpointError as error:
        findings.append(_bad_file(Path(error.path).name, error))
    else:
        files.append(tokenizer.file_name)
        if tokenizer.size > config.thinker.vocab_size:
            detail = f"{tokenizer.size} ids, but vocab_size is {config.thinker.vocab_size}"
            findings.append(Finding(tokenizer.file_name, "", Problem.BAD_FILE, detail))
    return CheckpointReport(str(folder), tuple(files), tensors, tuple(findings), notes)


def require_complete(folder: Path) -> CheckpointConfig:
    """The config of a checkpoint that has everything. Raises CheckpointError otherwise; the text
    tells the first findings and how many there are."""
    report = make_report(folder)
    if not report.complete:
        shown = "; ".join(describe(finding) for finding in report.findings[:5])
        more = len(report.findings) - 5
        tail = f"; and {more} more" if more > 0 else ""
        raise CheckpointError(CheckpointFault.SHAPE_MISMATCH, report.path, shown + tail)
    return read_config(folder)


def describe(finding: Finding) -> str:
    """One line for people."""
    subject = f"{finding.file}: {finding.name}" if finding.name else finding.file
    return f"{subject} {finding.problem.replace('_', ' ')} ({finding.detail})"


def _check_weights(
    folder: Path, config: CheckpointConfig, files: list[str], findings: list[Finding]
) -> int:
    """Compare the safetensors file, or the shards that the index names, with the layout."""
    try:
        by_file = _weight_headers(folder, findings)
    except CheckpointError as error:
        findings.append(_bad_file(Path(error.path).name, error))
        return 0
    files += by_file
    findings += _compare(by_file, weight_shapes(config), optional_names(config), WEIGHTS_NAME)
    return sum(len(found) for found in by_file.values())


def _weight_headers(folder: Path, findings: list[Finding]) -> dict[str, dict[str, TensorHeader]]:
    index_path = folder / INDEX_NAME
    if (folder / WEIGHTS_NAME).exists() or not index_path.exists():
        return {WEIGHTS_NAME: read_safetensors_header(folder / WEIGHTS_NAME)}
    weight_map = read_index(index_path)
    by_file: dict[str, dict[str, TensorHeader]] = {}
    for shard in sorted(set(weight_map.values())):
        try:
            by_file[shard] = read_safetensors_header(folder / shard)
        except CheckpointError as error:
            findings.append(_bad_file(shard, error))
    for name, shard in weight_map.items():
        if shard in by_file and name not in by_file[shard]:
            detail = "the index names it, the shard does not hold it"
            findings.append(Finding(shard, name, Problem.MISSING, detail))
    for shard, found in by_file.items():
        for name in found:
            if weight_map.get(name) != shard:
                detail = "the shard holds it, the index does not say so"
                findings.append(Finding(shard, name, Problem.UNEXPECTED, detail))
    return by_file


def _compare(
    by_file: Mapping[str, Mapping[str, TensorHeader]],
    expected: Mapping[str, Shape],
    optional: frozenset[str],
    main_file: str,
) -> list[Finding]:
    """Every difference between what the files hold and what they must hold."""
    findings: list[Finding] = []
    seen: set[str] = set()
    for file, found in by_file.items():
        for name, header in found.items():
            seen.add(name)
            if name in optional:
                continue
            shape = expected.get(name)
            if shape is None:
                detail = f"shape {list(header.shape)}"
                findings.append(Finding(file, name, Problem.UNEXPECTED, detail))
            elif shape != header.shape:
                detail = f"shape {list(header.shape)}, expected {list(shape)}"
                findings.append(Finding(file, name, Problem.MISSHAPED, detail))
            elif header.element_type not in FLOATING_TYPES:
                findings.append(Finding(file, name, Problem.WRONG_TYPE, header.element_type))
    for name, shape in expected.items():
        if name not in seen and name not in optional:
            detail = f"expected shape {list(shape)}"
            findings.append(Finding(main_file, name, Problem.MISSING, detail))
    return findings


def _check_front_end(
    folder: Path, config: CheckpointConfig, files: list[str], findings: list[Finding]
) -> tuple[str, ...]:
    """Only making a voice needs the two models: a checkpoint serves without them. What is there has
    to be right."""
    notes: list[str] = []
    for name in FRONT_END_NAMES:
        try:
            check_front_end(folder, name, config.token2wav)
        except CheckpointError as error:
            if error.fault is CheckpointFault.MISSING:
                notes.append(f"{name} is not there: no voice can be made with this checkpoint")
            else:
                findings.append(_bad_file(str(name), error))
            continue
        files.append(str(name))
    return tuple(notes)


def _check_voices(
    folder: Path, config: CheckpointConfig, files: list[str], findings: list[Finding]
) -> int:
    """Every voice file must be whole, and one must exist: without a voice nothing sounds."""
    tensors = 0
    paths = sorted((folder / VOICES_FOLDER).glob(f"*{VOICE_SUFFIX}"))
    if not paths:
        findings.append(Finding(VOICES_FOLDER, "", Problem.BAD_FILE, "holds no voice file"))
    for path in paths:
        name = f"{VOICES_FOLDER}/{path.name}"
        try:
            header = read_safetensors_header(path)
            check_voice_header(path, header, config.token2wav)
        except CheckpointError as error:
            findings.append(_bad_file(name, error))
            continue
        files.append(name)
        tensors += len(header)
    return tensors


def _bad_file(file: str, error: CheckpointError) -> Finding:
    return Finding(file, "", Problem.BAD_FILE, error.reason)
