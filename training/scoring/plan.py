"""What a batch scoring job does: the signature, the rows, the names of the files, and its record.

    OUTPUT/_score.json            the job: model, options, input; written first
    OUTPUT/part-00000.<suffix>    one file per partition, whole as soon as it has its name

A job that finds its own record goes on with the partitions that have no file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.export import (
    DEFAULT_SIGNATURE,
    EMBEDDINGS_DIR,
    ENCODED_SUFFIX,
    ITEMS_FILE,
    KEY,
    RANK_ITEMS,
    USERS_FILE,
    Give,
    read_card,
)
from conf.artefacts.run import read_json, write_json
from conf.errors import ConfigError, InputDataError
from conf.storage.atomic_output import remove_unfinished
from conf.storage.table_files import read_parquet
from training.prediction.answer_plan import Answerer, Asked, find_task, plan_answers
from training.prediction.candidates import report_unknown
from training.raw_inputs.files import RawFile, read_key_rows
from training.raw_inputs.inputs import InputColumn
from training.scoring.executor import (
    EMBEDDINGS,
    JOB_FILE,
    ListOptions,
    RowSource,
    ScoringTask,
)

JOB_FORMAT_VERSION = 1
EARLIER_JOB_FILE = "score.json"
"""Name of a record of before: a folder of Parquet cannot be read as one with it."""
PART_ROWS = 1 << 17
SHIPPED = ("saved_model.pb", "fingerprint.pb", "variables", "assets")


@dataclass(frozen=True)
class ScoringRequest:
    """What a user asks for; None stands for what `sluice predict` of the run does.

    Attributes:
        output: Directory of the files.
        give: What each row gets; None: lists of a retrieval model and of the users, else scores.
        source: Rows of raw values; None: the users that the export knows.
        k: Length of lists.
        task: Task that ranks, or None.
        candidates: File with the keys of the items that are ranked; None: the catalogue.
        keep_seen: Whether items that a user has met stay in the list.
        suffix: Format of the files; None: `json.gz` of lists, else `parquet`.
        part_rows: Rows of a partition.
    """

    output: Path
    give: Give | None = None
    source: RowSource | None = None
    k: int | None = None
    task: str | None = None
    candidates: Path | None = None
    keep_seen: bool = False
    suffix: str | None = None
    part_rows: int = PART_ROWS


@dataclass(frozen=True)
class Exported:
    """A version of a model, and what it says of itself."""

    directory: Path
    card: Mapping[str, Any]

    @property
    def is_ranking(self) -> bool:
        """Whether it scores pairs, rather than comparing vectors."""
        return "outputs" in self.card

    def find_inputs(self, signature: str) -> tuple[Mapping[str, Any], ...]:
        """Returns what is said of the features that a signature takes.

        Raises:
            ConfigError: The model does not have the signature.
        """
        signatures = self.card["signatures"]
        if signature not in signatures:
            raise ConfigError(
                "the exported model cannot give that",
                received=f"signature {signature}",
                allowed=", ".join(signatures),
                fix="choose something else by --give, or another model",
            )
        return tuple(item for item in signatures[signature]["inputs"] if "feature" in item)


def read_export(directory: Path) -> Exported:
    """Reads a version.

    Raises:
        ConfigError: It was exported by an earlier Sluice.
    """
    card = read_card(directory)
    if "lists" not in card:
        raise ConfigError(
            "this version was exported before batch scoring was possible",
            received=str(directory),
            fix="export the run again by `sluice export`",
        )
    return Exported(directory, card)


def plan_task(exported: Exported, request: ScoringRequest) -> ScoringTask:
    """Plans what executors do; the number of rows is not known yet, nor are columns of the input.

    Raises:
        ConfigError: The options do not fit each other or the model.
        InputDataError: Candidates are missing or unknown.
    """
    give = _plan_answers(exported, request)
    is_users, lists, suffix = request.source is None, None, "parquet"
    source = request.source or RowSource("users of the export", users_file=USERS_FILE)
    if give is Give.LISTS:
        signature, outputs, lists = _plan_lists(exported, request)
        signature, suffix = signature + (ENCODED_SUFFIX if is_users else ""), "json.gz"
        suffix = request.suffix or suffix
    elif give is Give.SCORES:
        signature, suffix = DEFAULT_SIGNATURE, request.suffix or suffix
        outputs = tuple(item["name"] for item in exported.card["outputs"])
    else:
        signature, outputs = str(give), ("embedding",)
    inputs = exported.find_inputs(signature)
    if is_users:
        _check_users(exported, inputs)
    if lists is None:
        _check_id(source.id_column, outputs)
    batch_size = int(exported.card["lists"]["batch_size"])
    part_rows = -(-request.part_rows // batch_size) * batch_size
    gives = str(give) if give in (Give.LISTS, Give.SCORES) else EMBEDDINGS
    return ScoringTask(
        str(request.output.absolute()), suffix, gives, signature, inputs, outputs, source, lists,
        batch_size, part_rows,
    )  # fmt: skip


def _plan_answers(exported: Exported, request: ScoringRequest) -> Give:
    """Returns what each row gets.

    Raises:
        ConfigError: The model cannot give it, or an option would be ignored.
    """
    of_lists = {"--k": request.k, "--task": request.task, "--candidates": request.candidates}
    given = [name for name, value in of_lists.items() if value is not None]
    asked = Asked(
        request.give,
        for_lists=bool(given),
        has_rows=request.source is not None,
        task=request.task,
        list_options=(*given, *(["--keep-seen"] if request.keep_seen else [])),
        say_lists="--give lists",
    )
    give = plan_answers(Answerer(exported.is_ranking), asked)
    if request.keep_seen and request.source is not None:
        raise ConfigError("of rows of an input nobody knows what was met", received="--keep-seen",
                          fix="leave it out")  # fmt: skip
    if request.suffix is not None and give not in (Give.SCORES, Give.LISTS):
        raise ConfigError("embeddings are written as parquet", received=f"--as {request.suffix}",
                          fix="leave it out; lists and scores have a choice")  # fmt: skip
    if give is not Give.LISTS and request.source is None:
        raise ConfigError("there are no rows", received=f"--give {give} without --input",
                          fix="name rows by --input; the export holds embeddings of its users and "
                          "items in embeddings/")  # fmt: skip
    return give


def _check_users(exported: Exported, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a model that reads more than what is known of the export's users.

    Raises:
        ConfigError: It does, or there are none.
    """
    users = exported.card["users"]
    names = [item["feature"] for item in inputs]
    unknown = names if users is None else [name for name in names if name not in users["features"]]
    if users is None or unknown:
        raise ConfigError(
            "the model reads more than the export knows of users",
            received="no users" if users is None else ", ".join(unknown),
            fix="give rows by --input",
        )


def _check_id(id_column: str | None, outputs: Sequence[str]) -> None:
    if (id_column or "row") in outputs:
        raise ConfigError(
            "the id has the name of an output, which is a column too",
            received=id_column or "row",
            fix="rename the column of the input",
        )


def _plan_lists(
    exported: Exported, request: ScoringRequest
) -> tuple[str, tuple[str, ...], ListOptions]:
    defaults, users = exported.card["lists"]["defaults"], exported.card["users"]
    mask = request.source is None and bool(defaults["mask_seen"]) and not request.keep_seen
    if mask and users is not None and not users["has_seen"]:
        raise ConfigError(
            "items that users have met cannot be left out: the export does not know them",
            fix="build the dataset with `seen: true`, or pass --keep-seen",
        )
    k = request.k or int(defaults["k"])
    if not exported.is_ranking:
        file = f"{EMBEDDINGS_DIR}/{ITEMS_FILE}"
        candidates = read_candidates(exported, file, request.candidates)
        options = ListOptions(k, file, candidates=candidates, mask_seen=mask)
        return str(Give.USER_EMBEDDING), ("embedding",), options
    signature = RANK_ITEMS
    exported.find_inputs(signature)
    tasks = {output["name"]: output for output in exported.card["outputs"]}
    task = find_task(tasks, request.task or defaults["task"])
    given = exported.card["signatures"][signature]["inputs"]
    [items_input] = [item["name"] for item in given if "feature" not in item]
    candidates = read_candidates(exported, ITEMS_FILE, request.candidates)
    is_binary = task["kind"] == "binary"
    options = ListOptions(k, ITEMS_FILE, items_input, is_binary, candidates, mask)
    return signature, (task["name"],), options


def read_candidates(
    exported: Exported, items_file: str, file: Path | None
) -> tuple[Any, ...] | None:
    """Returns the keys of a file that the catalogue has, sorted.

    Args:
        exported: The version.
        items_file: Its catalogue, a path below its directory.
        file: The candidates, a raw key a row; None: there are none.

    Raises:
        InputDataError: It has none of them, or a key stands twice in the file.
    """
    if file is None:
        return None
    key = InputColumn.from_json(exported.card["lists"]["item"])
    keys = read_parquet(exported.directory / items_file, [KEY])[KEY]
    rows = read_key_rows(RawFile(file), [key], key, 1 << 16)
    given = pa.array([one for part, _ in rows for one in part], keys.type)
    is_known = pc.is_in(given, keys.combine_chunks())
    report_unknown(RawFile(file), len(given), given.filter(pc.invert(is_known)))
    return tuple(sorted(given.filter(is_known).to_pylist()))


def pack_model(exported: Exported, task: ScoringTask, target: Path) -> None:
    """Writes what executors need of a version into an archive, nothing compressed."""
    wanted = {task.source.users_file, task.lists and task.lists.items_file}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(exported.card["files"]):
            if name in wanted or name.partition("/")[0] in SHIPPED:
                archive.write(exported.directory / name, name)


@dataclass(frozen=True)
class Job:
    """A job with its record in the output directory.

    Attributes:
        task: What executors do.
        record: What decides each byte of the output.
    """

    task: ScoringTask
    record: dict[str, Any]

    @property
    def directory(self) -> Path:
        """The output directory."""
        return Path(self.task.output)

    def open(self) -> str:
        """Writes the record, or compares it with the one that is there.

        Returns:
            `new`, `running` (it was begun) or `finished`.

        Raises:
            ConfigError: The directory holds something else.
        """
        file, earlier = self.directory / JOB_FILE, self.directory / EARLIER_JOB_FILE
        if earlier.is_file() and not file.is_file():
            earlier.rename(file)
        if not file.is_file():
            if self.directory.exists() and any(self.directory.iterdir()):
                raise ConfigError(
                    "the output directory holds other files",
                    received=str(self.directory),
                    allowed="a new or empty directory, or one of this command",
                )
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write("running")
            return "new"
        content = read_json(file)
        _refuse_other(self.directory, content.get("job", {}), self.record)
        return str(content["status"])

    def find_missing(self) -> list[int]:
        """Returns the partitions that have no file."""
        names = {path.name for path in self.directory.iterdir()}
        parts = range(self.task.parts)
        return [part for part in parts if self.task.name_part(part) not in names]

    def finish(self) -> None:
        """Writes that the output is complete, and removes what killed tasks left."""
        files = {}
        for part in range(self.task.parts):
            path = self.directory / self.task.name_part(part)
            remove_unfinished(path)
            files[path.name] = {"rows": self.task.count_rows(part), "bytes": path.stat().st_size}
        self._write("finished", files=files)

    def _write(self, status: str, **more: Any) -> None:
        head = {"format_version": JOB_FORMAT_VERSION, "status": status}
        write_json(self.directory / JOB_FILE, {**head, "job": self.record, **more})


def build_job(exported: Exported, task: ScoringTask, inputs: Mapping[str, Any]) -> Job:
    """Builds a job.

    Args:
        exported: The model.
        task: What executors do, with the number of rows.
        inputs: What tells the input from others.
    """
    plain = {
        name: value for name, value in asdict(task).items() if name not in ("output", "threads")
    }
    card = exported.card
    model = {name: card[name] for name in ("name", "version", "fingerprint")}
    record = {"model": model, "input": dict(inputs), **plain}
    return Job(task, _to_json(record))


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse_other(directory: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    differing = [name for name in own if found.get(name) != own[name]]
    if differing:
        shown = differing[0]
        raise ConfigError(
            f"{directory} holds the output of another job: {', '.join(differing)} differ",
            received=f"{shown}: {own[shown]}"[:300],
            allowed=f"{shown}: {found.get(shown)}"[:300],
            fix="name another directory by --to, or remove this one",
        )


def set_rows(task: ScoringTask, rows: int) -> ScoringTask:
    """Returns a task with the number of its rows.

    Raises:
        InputDataError: There is none.
    """
    if not rows:
        raise InputDataError("the input has no rows", received=task.source.place)
    return replace(task, rows=rows)


def count_users(exported: Exported) -> int:
    """Returns the number of users that a version knows."""
    return int(exported.card["users"]["rows"])
