"""Reads a config from a preset or file, applies overrides, and explains what does not fit."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from conf.errors import ConfigError, did_you_mean
from conf.yaml_text import MOST_CHARACTERS, parse_yaml

ConfigT = TypeVar("ConfigT", bound=BaseModel)


INCLUDE = "include"
"""Key of a config file that names the files, or presets, that it starts from."""
_MOST_INCLUDES = 8
_MOST_FILES = 100
"""Files that one config may be made of, each counted as often as it is included."""


def load_config(
    cls: type[ConfigT], kind: str, source: str | None, overrides: Sequence[str] = ()
) -> ConfigT:
    """Builds a config from a preset name or a YAML file, with `a.b=c` overrides on top.

    Args:
        cls: Config class.
        kind: Preset folder, `etl` or `training`.
        source: Preset name, path of a YAML file, or None for defaults and overrides alone.
        overrides: `a.b=c` each; the value is read as YAML.

    Raises:
        ConfigError: Unknown preset or file, not YAML, unknown key, or a value that does not fit.
    """
    data = {} if source is None else read_yaml(kind, source)
    for override in overrides:
        apply_override(data, override)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _explain(cls, error, source) from error


def preset_names(kind: str) -> list[str]:
    """Returns the names of the presets that come with Sluice."""
    folder = resources.files("conf") / "presets" / kind
    if not folder.is_dir():
        return []
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def read_yaml(kind: str, source: str) -> dict[str, Any]:
    """Reads a preset by name, or a YAML file by path, with what it includes under it.

    Mappings are merged key by key, later files over earlier ones and the file itself over all;
    lists and plain values are replaced.

    Args:
        kind: Preset folder, `etl` or `training`.
        source: Preset name, or path of a YAML file.

    Raises:
        ConfigError: There is neither, the content is not a YAML mapping, or files include each
            other in a circle, too deeply or too often.
    """
    return _read_with_included(kind, source, (), [])


def _read_with_included(
    kind: str, source: str, includers: tuple[str, ...], read: list[str]
) -> dict[str, Any]:
    """Reads a file and what it includes.

    Args:
        kind: Preset folder.
        source: Preset name, or path of a YAML file.
        includers: The files that lead to this one, from the outermost on.
        read: The files that were read so far; this one and those that it includes are added.
    """
    read.append(source)
    _check_includes(source, includers, len(read))
    data = _read_mapping(kind, source, includers)
    included = data.pop(INCLUDE, None)
    names = [included] if isinstance(included, str) else included or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"`{INCLUDE}` of {source} must be a file or a list of files",
            received=_short(included),
            allowed="paths from this file's folder, or names of presets",
        )
    merged: dict[str, Any] = {}
    for name in names:
        place = name if name in preset_names(kind) else str(Path(source).parent / name)
        merged = _merge(merged, _read_with_included(kind, place, (*includers, source), read))
    return _merge(merged, data)


def _check_includes(source: str, includers: tuple[str, ...], files: int) -> None:
    how, allowed = "", f"at most {_MOST_INCLUDES} levels"
    if source in includers:
        how = "in a circle"
    elif len(includers) > _MOST_INCLUDES:
        how = "too deeply"
    elif files > _MOST_FILES:
        how, allowed = "too often", f"at most {_MOST_FILES} files, repeated ones counted each time"
    if how:
        raise ConfigError(
            f"config files include each other {how}",
            received=" > ".join((*includers, source)),
            allowed=allowed,
        )


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        is_group = isinstance(known, dict) and isinstance(value, dict)
        merged[key] = {**_merge(known or {}, value)} if is_group else value
    return merged


def _read_mapping(kind: str, source: str, includers: tuple[str, ...]) -> dict[str, Any]:
    if source in preset_names(kind):
        text = (resources.files("conf") / "presets" / kind / f"{source}.yaml").read_text("utf-8")
    elif Path(source).is_file():
        text = _read_text(Path(source))
    else:
        names = ", ".join(preset_names(kind))
        raise ConfigError(
            "no such config",
            received=f"{source}, which {includers[-1]} includes" if includers else source,
            allowed=f"a YAML file, or a preset: {names}" if names else "a YAML file",
            fix=did_you_mean(source, preset_names(kind)) if names else "correct the path",
        )
    data = parse_yaml(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping", received=type(data).__name__)
    return data


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", received=str(error)) from error


def apply_override(data: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c` in a nested mapping, in place; list elements by index (`features.0.name`).

    Raises:
        ConfigError: No `=`, an empty key, a value that is not YAML, or a path through a scalar.
    """
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError("an override must be KEY=VALUE", received=override, allowed="a.b=c")
    value = parse_yaml(raw, f"the value of {key.strip()}") if raw else None
    set_key(data, key, value, override)


def set_key(data: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Sets one key `a.b` in a nested mapping, in place.

    Args:
        data: The mapping.
        key: Keys of the nested mappings, or positions of a list, joined by dots.
        value: What it becomes.
        origin: What the user wrote, for the message.

    Raises:
        ConfigError: A path through a scalar, or a position that a list does not have.
    """
    *parents, last = key.strip().split(".")
    node: Any = data
    for part in parents:
        node = _step(node, part, origin)
    if isinstance(node, list):
        node[_index(node, last, origin)] = value
    else:
        node[last] = value


def override_config(config: ConfigT, values: Mapping[str, Any], origin: str) -> ConfigT:
    """Returns a config with some keys changed; keys that nobody has set keep their defaults.

    Args:
        config: The config.
        values: New values by key `a.b`.
        origin: Where they come from, for the message.

    Raises:
        ConfigError: A key is unknown, or a value does not fit.
    """
    data = config.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        set_key(data, key, value, f"{key}={value}")
    try:
        return type(config).model_validate(data)
    except ValidationError as error:
        raise _explain(type(config), error, origin) from error


def _step(node: Any, part: str, override: str) -> Any:
    child = node[_index(node, part, override)] if isinstance(node, list) else node.get(part)
    if child is None and isinstance(node, dict):
        child = node[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"{part!r} holds a plain value, not a group of keys", received=override)
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
        raise ConfigError(
            "a list element is named by its position",
            received=override,
            allowed=f"0 to {len(node) - 1}",
        )
    return int(part)


def _explain(cls: type[BaseModel], error: ValidationError, source: str | None) -> ConfigError:
    lines = []
    fix = None
    for item in error.errors():
        where = ".".join(map(str, _drop_tags(cls, item["loc"]))) or "(top level)"
        if item["type"] == "extra_forbidden":
            name = str(item["loc"][-1])
            hint = did_you_mean(name, _keys_at(cls, item["loc"][:-1]))
            lines.append(f"{where}: unknown key; {hint}")
            fix = fix or hint
        elif item["type"] == "missing":
            lines.append(f"{where}: required, not given")
        elif item["type"] == "value_error":
            # The message of a check of ours says what it found.
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(f"{where}: {item['msg']}, received {_short(item['input'])}")
            fix = fix or _advise_quotes(item)
    origin = source or "overrides"
    return ConfigError(
        f"config {origin} has {len(lines)} error(s)",
        received="\n            ".join(lines),
        fix=fix or "correct the keys above, in the file or by --set KEY=VALUE",
    )


def _advise_quotes(item: Mapping[str, Any]) -> str | None:
    """Says how YAML reads bare words and numbers where text is wanted; None: it is not that."""
    kind, value = item["type"], item["input"]
    is_text = kind in ("string_type", "invalid_key", "literal_error", "enum")
    if kind == "string_type" and type(value) in (int, float):
        return f"quote it: text is wanted; write '{value}'"
    if not is_text or not isinstance(value, bool):
        return None
    words = ("on", "yes", "true") if value else ("off", "no", "false")
    allowed = item.get("ctx", {}).get("expected")
    if allowed is not None and not any(f"'{word}'" in allowed for word in words):
        return None
    first, second, third = words
    return (
        f"quote it: YAML reads {first}, {second} and {third} without quotes as {value}; "
        f"write '{first}'"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_at(cls: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Valid keys of the model at a location of a validation error; tags pick members of unions."""
    *_, (_, candidates) = _walk(cls, location)
    return sorted({key for model in _models(candidates) for key in model.model_fields})


def _drop_tags(cls: type[BaseModel], location: Sequence[int | str]) -> list[int | str]:
    """Returns a location of a validation error as the config has it: without tags of unions."""
    return [part for part, (is_tag, _) in zip(location, _walk(cls, location)[1:], strict=True)
            if not is_tag]  # fmt: skip


def _walk(cls: type[BaseModel], location: Sequence[int | str]) -> list[tuple[bool, list[Any]]]:
    """Follows a location: for its start and each part whether that is a tag, and what it holds."""
    steps: list[tuple[bool, list[Any]]] = [(False, [cls])]
    is_key = False
    for part in location:
        candidates = steps[-1][1]
        models = _models(candidates)
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        tagged = [m for m in models if any(f.default == part for f in m.model_fields.values())]
        is_tag = bool(tagged) and not fields and not is_key
        if fields:
            candidates = [leaf for field in fields for leaf in _leaves(field)]
        elif is_tag:
            candidates = tagged
        # Keys of a mapping may be named like a tag.
        is_key = any(_is_mapping(field) for field in fields)
        steps.append((is_tag, candidates))
    return steps


def _models(candidates: Sequence[Any]) -> list[type[BaseModel]]:
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin in (Annotated, Union, types.UnionType):
        return any(_is_mapping(argument) for argument in get_args(annotation))
    return origin in (dict, Mapping)


def _leaves(annotation: Any) -> list[Any]:
    """The classes inside Optional, tuple, dict and Annotated annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _leaves(get_args(annotation)[0])
    if origin in (Union, types.UnionType, tuple, list, dict, Mapping):
        return [leaf for argument in get_args(annotation) for leaf in _leaves(argument)]
    return [annotation]
