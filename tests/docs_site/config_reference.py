"""The reference of all config keys, from the pydantic models in `conf/`.

A new model or key needs no change here: models are found by looking through the package, and a
model that no other one holds gets a page of its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic_core import to_jsonable_python

import conf
from conf.config_base import Strict
from tests.docs_site.markdown import join_blocks, render_table

ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "pattern": "matches `{}`",
}
LONGEST_DEFAULT = 60


@dataclass(frozen=True)
class Key:
    """One key of a model, in words; `type` links to the models that it may hold."""

    name: str
    description: str  # empty where the code does not say
    type: str
    default: str | None  # as it would be written in YAML; None: it must be given
    allowed: str


@dataclass(frozen=True)
class Model:
    """A group of keys, of a class or of what several classes derive from.

    Attributes:
        name: Name of its class.
        title: Where it stands in a config, and what chooses it there.
        summary: What it is for, from the docstring.
        keys: Those that no other group holds, in the order of the code.
        shared: Names of the groups that hold the others.
        defaults: Of these, the defaults that are other ones here, by key.
        place: File and class, for messages.
    """

    name: str
    title: str
    summary: str
    keys: tuple[Key, ...]
    shared: tuple[str, ...]
    defaults: dict[str, str]
    place: str


def find_roots() -> dict[str, type[Strict]]:
    """Returns the configs that stand alone: classes in `conf/` that nothing holds or extends."""
    for module in pkgutil.walk_packages(conf.__path__, "conf."):
        importlib.import_module(module.name)
    models = {cls for cls in _subclasses(Strict) if cls.__module__.startswith("conf.")}
    held = {held for cls in models for held in list(_list_models(cls))[1:]}
    roots = {cls for cls in models - held if cls.model_fields and not cls.__subclasses__()}
    return {cls.__name__: cls for cls in sorted(roots, key=lambda cls: cls.__name__)}


def _subclasses(cls: type[Strict]) -> Iterator[type[Strict]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _list_models(root: type[Strict]) -> dict[type[Strict], str]:
    """A model and those that it holds, in the order of their use, each with its first key path."""
    found = {root: ""}
    waiting = [root]
    for model in waiting:
        for name, field in model.model_fields.items():
            path = f"{found[model]}.{name}".removeprefix(".")
            for held, where in _classes(field.annotation, path):
                if held not in found:
                    found[held] = where
                    waiting.append(held)
    return found


def _classes(annotation: Any, path: str) -> Iterator[tuple[type[Strict], str]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation, path
    suffix = {tuple: "[]", list: "[]", dict: ".NAME"}.get(get_origin(annotation), "")
    for argument in get_args(annotation):
        yield from _classes(argument, path + suffix)


def describe_tree(root: type[Strict]) -> list[Model]:
    """Returns a config's models: itself, then those that it holds, in the order of their use.

    Keys that several models inherit are those of what they derive from, which stands before them.
    """
    found = _list_models(root)
    users: dict[type[Strict], list[type[Strict]]] = {}
    for cls in found:
        for base in _bases(cls):
            users.setdefault(base, []).append(cls)
    shared = {base for base, of in users.items() if len(of) > 1 or base in found}
    models: dict[type[Strict], Model] = {}
    for cls, path in found.items():
        for base in reversed(_bases(cls)):
            if base in shared - models.keys() - found.keys():
                title = _find_shared_title(users[base], found)
                models[base] = _describe(base, title, shared)
        models[cls] = _describe(cls, _find_title(cls, path), shared)
    named = {model.name for model in models.values() if model.keys}
    return [
        replace(model, shared=tuple(name for name in model.shared if name in named))
        for cls, model in models.items()
        if model.keys or cls in found
    ]


def _find_shared_title(users: list[type[Strict]], found: dict[type[Strict], str]) -> str:
    """Where the models stand that share a group of keys."""
    paths = dict.fromkeys(found[user] for user in users)
    if len(paths) > 1:
        return f"All of {', '.join(f'`{path}`' for path in paths)}"
    return f"`{found[users[0]]}`, all of {', '.join(map(_find_name, users))}"


def _bases(cls: type[Strict]) -> list[type[Strict]]:
    """The classes that a model inherits keys from, the nearest first."""
    return [c for c in cls.__mro__[1:] if issubclass(c, Strict) and inspect.get_annotations(c)]


def _find_home(cls: type[Strict], name: str, shared: set[type[Strict]]) -> type[Strict]:
    """The class furthest up that declares a key and is a group of its own."""
    homes = [c for c in _bases(cls) if c in shared and name in inspect.get_annotations(c)]
    return homes[-1] if homes else cls


def _references(node: Any) -> list[str]:
    """Names of the models that a part of a schema refers to, each once."""
    if isinstance(node, list):
        parts = [name for item in node for name in _references(item)]
    elif isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
        parts = own + [n for k, v in node.items() if k != "default" for n in _references(v)]
        parts = [n for n in parts if n != "mapping"]
    else:
        parts = []
    return list(dict.fromkeys(parts))


def _describe(cls: type[Strict], title: str, shared: set[type[Strict]]) -> Model:
    schema, own, defaults = cls.model_json_schema(), [], {}
    # A class that holds itself is a reference into its own definitions.
    schema = schema.get("$defs", {}).get(cls.__name__, schema)
    for key in _list_keys(cls):
        home = _find_home(cls, key.name, shared)
        near = next((b for b in _bases(cls) if b in shared and key.name in b.model_fields), cls)
        if home is cls or replace(key, default=None) != replace(_find_key(home, key), default=None):
            own.append(key)
        elif key.default != _find_key(near, key).default:
            defaults[key.name] = str(key.default)
    place = f"{cls.__module__.replace('.', '/')}.py: {cls.__name__}"
    above = [base for base in reversed(_bases(cls)) if base in shared]
    covered = {further for base in above for further in _bases(base)}
    bases = tuple(base.__name__ for base in above if base not in covered)
    return Model(cls.__name__, title, _summary(schema), tuple(own), bases, defaults, place)


def _find_key(cls: type[Strict], key: Key) -> Key:
    return next(one for one in _list_keys(cls) if one.name == key.name)


@cache
def _list_keys(cls: type[Strict]) -> tuple[Key, ...]:
    """The keys of a class, but for those of one value, which its title names."""
    whole = cls.model_json_schema()
    definitions = whole.get("$defs", {})
    schema = definitions.get(cls.__name__, whole)
    attributes = {
        name: " ".join(text.split())
        for parent in reversed(cls.__mro__)
        for name, text in ATTRIBUTE.findall(inspect.cleandoc(parent.__doc__ or ""))
    }
    required = set(schema.get("required", ()))
    return tuple(
        Key(
            name=name,
            description=value.get("description")
            or attributes.get(name)
            or _describe_by_type(value, definitions),
            type=_type_in_words(value),
            default=None if name in required else _default_in_words(cls, name),
            allowed=_allowed_in_words(value),
        )
        for name, value in schema.get("properties", {}).items()
        if "const" not in value
    )


def _summary(schema: dict[str, Any]) -> str:
    """The docstring without its list of attributes."""
    return str(schema.get("description", "")).partition("\n\nAttributes:")[0].strip()


def _describe_by_type(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a key without words of its own says by its type."""
    held = _references(value)
    if len(held) == 1:
        return _summary(definitions[held[0]]).partition("\n\n")[0].replace("\n", " ")
    return ""


def _find_title(cls: type[Strict], path: str) -> str:
    tags = [f"`{key}: {value}`" for key, value in _find_tags(cls).items()]
    return ", ".join([f"`{path}`" if path else "Top level", *tags])


def _find_name(cls: type[Strict]) -> str:
    """What chooses a model, or what it is called."""
    tags = list(_find_tags(cls).values())
    return f"`{tags[-1]}`" if tags else _title(cls.__name__)


def _find_tags(cls: type[Strict]) -> dict[str, str]:
    """The keys that have one value only: they choose the model among others."""
    fields = {name: field.annotation for name, field in cls.model_fields.items()}
    literals = {name: get_args(t) for name, t in fields.items() if get_origin(t) is Literal}
    return {name: str(values[0]) for name, values in literals.items() if len(values) == 1}


def _type_in_words(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{_title(name)}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in value:
            parts = list(dict.fromkeys(_type_in_words(part) for part in value[union]))
            return " or ".join(parts)
    if "const" in value or "enum" in value:
        return "text" if isinstance(_choices(value)[0], str) else "number"
    kind = value.get("type")
    if kind == "array":
        return f"list of {_type_in_words(value.get('items', {}))}"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"mapping of names to {_type_in_words(inner if isinstance(inner, dict) else {})}"
    names = {"string": "text", "integer": "whole number", "number": "number", "null": "null"}
    return {**names, "boolean": "true or false"}.get(str(kind), "any value")


def _title(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.strip("_").removesuffix("Config"))
    return " ".join(word if word.isupper() else word.lower() for word in words.split())


def _choices(value: dict[str, Any]) -> list[Any]:
    return [value["const"]] if "const" in value else list(value["enum"])


def _default_in_words(cls: type[Strict], name: str) -> str:
    default = cls.model_fields[name].get_default(call_default_factory=True)
    if isinstance(default, Strict):
        return _group_in_words(default)
    text = json.dumps(to_jsonable_python(default), ensure_ascii=False)
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see there"


def _group_in_words(default: Strict) -> str:
    """A group's default by the keys that choose it; its other keys have defaults of their own."""
    tags = {
        key: getattr(default, key)
        for key in ("kind", "name", "source")
        if key in type(default).model_fields and isinstance(getattr(default, key), str)
    }
    return f"`{json.dumps(tags)}`" if tags else "its defaults"


def _allowed_in_words(value: dict[str, Any]) -> str:
    if "const" in value or "enum" in value:
        return ", ".join(f"`{choice}`" for choice in _choices(value))
    own = [text.format(value[limit]) for limit, text in LIMITS.items() if limit in value]
    inner = [_allowed_in_words(part) for u in ("anyOf", "oneOf") for part in value.get(u, ())]
    for part in ("items", "additionalProperties"):
        if isinstance(value.get(part), dict):
            inner.append(_allowed_in_words(value[part]))
    return ", ".join(dict.fromkeys(filter(None, (*own, *inner))))


def find_undescribed() -> list[str]:
    """Returns where a key has no words: file, class and key."""
    missing = [
        f"{model.place}.{key.name}"
        for root in find_roots().values()
        for model in describe_tree(root)
        for key in model.keys
        if not key.description
    ]
    return sorted(set(missing))


def render_pages() -> dict[str, str]:
    """Returns a page per config by file name, in Markdown."""
    return {f"{_title(name)}.md": _render_page(root) for name, root in find_roots().items()}


def _render_page(root: type[Strict]) -> str:
    title = f"# Keys of `{_title(root.__name__)}` configs"
    return join_blocks([title, *map(_render_model, describe_tree(root))])


def _render_model(model: Model) -> str:
    heading = f'<a id="{model.name.lower()}"></a>\n\n## {model.title}'
    header = ("key", "meaning", "type", "default", "allowed")
    table = render_table(header, map(_render_key, model.keys)) if model.keys else ""
    links = ", ".join(f"[{_title(name)}](#{name.lower()})" for name in model.shared)
    above = f"And the keys of {links}" + ("; other defaults: " if model.defaults else ".")
    above += ", ".join(f"`{name}` {value}" for name, value in model.defaults.items())
    parts = (heading, _as_yaml(model.summary), table, above if links else "")
    return "\n\n".join(filter(None, parts))


def _render_key(key: Key) -> tuple[str, ...]:
    default = "required" if key.default is None else key.default
    return f"`{key.name}`", _as_yaml(key.description), key.type, default, key.allowed


def _as_yaml(text: str) -> str:
    """Python's words for a value in YAML's."""
    return re.sub(r"\bNone\b", "`null`", text)
