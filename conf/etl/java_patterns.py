"""Patterns that Java reads: of times, and regular expressions; checked here without a Java.

Both checks are strict: what they accept, Spark compiles. Of times: the letters that Spark parses of
`java.time.format.DateTimeFormatter` (sql-ref-datetime-pattern.html); of text: the grammar of
`java.util.regex.Pattern`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MOST_IN_A_ROW = {
    **dict.fromkeys("dHhKkms", 2), **dict.fromkeys("GMLz", 4), **dict.fromkeys("XxZ", 5),
    "y": 6, "D": 3, "S": 9, "a": 1, "V": 2, "O": 4,
}  # fmt: skip
_EXACT = {"V": (2,), "O": (1, 4)}
_RESERVED = ("'", "{", "}", "#")
_TIME_TOKEN = re.compile(r"'(?:[^']|'')*'|%?([A-Za-z])\1*|.", re.DOTALL)


def check_time_pattern(written: str) -> None:
    """Refuses a pattern of times that Spark does not parse texts by.

    Raises:
        ValueError: It holds something else, such as `YYYY`, `EEE`, `%Y` or a bare `T`, or its parts
            do not fit each other: minutes without hours (`yyyy-mm-dd`), a part twice.
    """
    is_open, required, letters = 0, "", set()
    for token in _TIME_TOKEN.finditer(written):
        text, letter = token[0], token[1]
        is_open += {"[": 1, "]": -1}.get(text, 0)
        counts = _EXACT.get(letter, range(1, _MOST_IN_A_ROW.get(letter, 0) + 1))
        is_known = text[0] != "%" and len(text) in counts if letter else text not in _RESERVED
        if not is_known or is_open < 0:
            raise ValueError(
                f"timestamp_format {written!r}: Spark does not parse {text!r}; write Java's "
                "letters, such as yyyy-MM-dd HH:mm:ss.SSS, other letters in quotes ('T'), or "
                "epoch_s, epoch_ms, epoch_us"
            )
        letters.add(letter)
        required += "" if is_open else letter or ""
    _check_parts(written, required, letters)


def _check_parts(written: str, required: str, letters: set[str | None]) -> None:
    """Refuses parts that make another time than is meant: Spark reads `yyyy-mm-dd` as January."""
    twice = next((part for part in "yMdHhKkmsSa" if required.count(part) > 1), None)
    if twice is not None:
        wrong = f"{twice} twice: MM is the month, mm are minutes, ss seconds, SSS fractions"
    elif "m" in letters and not letters & set("HhKk"):
        wrong = "minutes (m) without an hour: MM is the month"
    elif letters & set("hK") and "a" not in letters:
        wrong = "an hour of 12 (h) without a: HH is the hour of the day"
    elif "S" in letters and "s" not in letters:
        wrong = "fractions (S) without seconds: ss are seconds"
    else:
        return
    raise ValueError(f"timestamp_format {written!r} has {wrong}")


_FLAGS = "[idmsuxU]*"
_GROUP = re.compile(
    r"\((?:\?(?:(?P<kind>[:=!>]|<[=!])|<(?P<name>[A-Za-z][A-Za-z0-9]*)>"
    rf"|(?P<on>{_FLAGS})(?:-(?P<off>{_FLAGS}))?(?P<end>[:)]))|(?!\?))"
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\})[?+]?")
_CHARACTER = (
    r"\\(?:0(?P<octal>[0-3][0-7]{2}|[0-7]{1,2})|c(?P<control>[!-~])|u(?P<four>[0-9A-Fa-f]{4})"
    r"|x(?:(?P<two>[0-9A-Fa-f]{2})|\{(?P<hex>[0-9A-Fa-f]{1,6})\})|(?P<other>[aefnrt]|[^A-Za-z0-9]))"
)
_SET = r"\\(?:[dDhHsSvVwW]|[pP](?:(?P<short>[A-Z])|\{(?P<property>[^{}]+)\}))"
_IN_CLASS = re.compile(rf"(?P<character>{_CHARACTER})|{_SET}", re.DOTALL)
_OUTSIDE = re.compile(
    rf"{_CHARACTER}|{_SET}|\\(?:[ABGzZRX1-9]|b(?!\{{)|b\{{g\}}|k<(?P<reference>[A-Za-z0-9]+)>)",
    re.DOTALL,
)
_VALUES = {"a": 7, "e": 27, "f": 12, "n": 10, "r": 13, "t": 9}
_SPACE = re.compile(r"(?:[ \t\n\v\f\r]|#[^\n\r\u0085\u2028\u2029]*[\n\r\u0085\u2028\u2029])*")
_QUOTED = re.compile(r"\\Q(.*?)\\E|\\.", re.DOTALL)
_LARGEST = 2**31 - 1
_HINTS = {
    "(?P<": "a named group is (?<name>…)", "(?P=": r"write \k<name>",
    "(?P>": "there is no recursion", "(?(": "there are no conditional groups",
    "(?#": "there are no comments but by (?x)", "(?<": "names are of letters and digits alone",
    "{": r"a brace is \{",
}  # fmt: skip


@dataclass
class _Regex:
    """A regular expression, and how far it has been read."""

    text: str
    at: int = 0
    groups: int = 0
    names: set[str] = field(default_factory=set)
    has_comments: bool = False

    def skip_space(self) -> None:
        if self.has_comments and (space := _SPACE.match(self.text, self.at)):
            self.at = space.end()
            if self.text[self.at : self.at + 1] == "#":  # It would hide the end of the group.
                raise self.refuse()

    def peek(self) -> str:
        self.skip_space()
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.refuse()
        self.at = found.end()
        return found

    def refuse(self) -> ValueError:
        rest = self.text[self.at : self.at + 12]
        hints = [f"; {hint}" for start, hint in _HINTS.items() if rest.startswith(start)]
        said = f"what stands at {self.at + 1}, {rest!r}" if rest else "that it ends there"
        said += "".join(hints[:1])
        return ValueError(f"pattern: Java's regular expressions do not allow {said}")


def count_groups(pattern: str) -> int:
    """Returns the number of capturing groups of a regular expression of Java's.

    Raises:
        ValueError: Java does not compile it.
    """
    regex = _Regex(_QUOTED.sub(_unquote, pattern))
    _read_alternatives(regex)
    if regex.at < len(regex.text):
        raise regex.refuse()
    return regex.groups


def _unquote(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else re.sub(r"[^A-Za-z0-9]", r"\\\g<0>", found[1])


def _read_alternatives(regex: _Regex, *, is_bounded: bool = False) -> None:
    """Reads up to the end of a group; a bounded one, behind `(?<=`, has a greatest length."""
    while (character := regex.peek()) not in ("", ")"):
        if character == "|":
            regex.at += 1
        elif character == "(":
            _read_group(regex, is_bounded=is_bounded)
        else:
            _read_atom(regex, character, is_bounded=is_bounded)
            _read_quantifier(regex, is_bounded=is_bounded)


def _read_atom(regex: _Regex, character: str, *, is_bounded: bool) -> None:
    if character == "[":
        _read_class(regex)
    elif character == "\\":
        start, escape = regex.at, regex.take(_OUTSIDE)
        name, is_reference = escape["reference"], re.match(r"\\[1-9k]", escape[0])
        unknown = name is not None and name not in regex.names
        if unknown or (is_bounded and (is_reference or escape[0] == r"\X")):
            regex.at = start
            raise regex.refuse()
        _check_escape(regex, escape)
    elif character in "*+?{":
        raise regex.refuse()
    else:
        regex.at += 1


def _read_group(regex: _Regex, *, is_bounded: bool) -> None:
    start, had_comments = regex.at, regex.has_comments
    found = regex.take(_GROUP)
    if found["name"] in regex.names:
        regex.at = start
        raise regex.refuse()
    if found["on"] is not None:
        regex.has_comments = ("x" in found["on"] or had_comments) and "x" not in (
            found["off"] or ""
        )
        if found["end"] == ")":
            return  # The flags hold up to the end of the group around them.
    elif found["kind"] is None:
        regex.groups += 1
        regex.names |= {found["name"]} if found["name"] else set()
    _read_alternatives(regex, is_bounded=is_bounded or found["kind"] in ("<=", "<!"))
    if regex.peek() != ")":
        raise regex.refuse()
    regex.at += 1
    regex.has_comments = had_comments
    _read_quantifier(regex, is_bounded=is_bounded, is_group=True)


def _read_quantifier(regex: _Regex, *, is_bounded: bool, is_group: bool = False) -> None:
    character = regex.peek()
    if not character or character not in "*+?{":
        return
    start, found = regex.at, regex.take(_QUANTIFIER)
    least = int(found["least"] or 0)
    most = int(found["most"] or _LARGEST) if found["comma"] else least
    is_open = character in "*+" or (found["comma"] and not found["most"])
    is_unclear = is_bounded and (is_open or (is_group and character != "?"))
    if not least <= most <= _LARGEST or is_unclear:
        regex.at = start
        raise regex.refuse()


def _read_class(regex: _Regex) -> None:
    """Reads a class, and those within it, by Java's rules: `[a-z&&[^aeiou]]`."""
    regex.take(re.compile(r"\[\^?"))
    is_empty = True
    while (character := regex.peek()) != "]" or is_empty:
        if not character:
            raise regex.refuse()
        if character == "[":
            _read_class(regex)
        elif regex.text.startswith("&&", regex.at):
            if is_empty or regex.text[regex.at + 2 : regex.at + 3] in ("", "]", "&"):
                raise regex.refuse()
            regex.at += 2
        else:
            _read_range(regex)
        is_empty = False
    regex.at += 1


def _read_range(regex: _Regex) -> None:
    start, first = regex.at, _read_member(regex)
    if first is None or regex.peek() != "-":
        return
    dash = regex.at
    regex.at += 1
    if regex.peek() in ("", "]", "["):
        regex.at = dash
        return
    last = _read_member(regex)
    if last is None or last < first:
        regex.at = start
        raise regex.refuse()


def _read_member(regex: _Regex) -> int | None:
    """Reads a character of a class and returns its number; None: it is a set of characters."""
    if regex.text[regex.at] != "\\":
        regex.at += 1
        return ord(regex.text[regex.at - 1])
    escape = regex.take(_IN_CLASS)
    _check_escape(regex, escape)
    return None if escape["character"] is None else _number_of(escape)


def _number_of(escape: re.Match[str]) -> int:
    if escape["octal"]:
        return int(escape["octal"], 8)
    if escape["control"]:
        return ord(escape["control"]) ^ 64
    digits = escape["four"] or escape["two"] or escape["hex"]
    other = escape["other"]
    return int(digits, 16) if digits else _VALUES.get(other, ord(other))


def _check_escape(regex: _Regex, escape: re.Match[str]) -> None:
    short, name = escape["short"], escape["property"]
    is_known = (short or "L") in "LMNPSZC" and (name is None or _PROPERTY.fullmatch(name))
    if not is_known or int(escape["hex"] or "0", 16) > 0x10FFFF:
        regex.at = escape.start()
        raise regex.refuse()


_CATEGORY = "[LMNPSZC]|L[Cultmo]|M[nce]|N[dlo]|P[cdsefio]|S[mcko]|Z[slp]|C[cfson]"
_SCRIPT = (
    "(?i:latin|greek|cyrillic|armenian|hebrew|arabic|devanagari|bengali|tamil|telugu|thai|georgian"
    "|hangul|hiragana|katakana|han|common)"
)
_BLOCK = "(?i:greek|cyrillic|armenian|hebrew|arabic|thai|hiragana|katakana|basiclatin)"
_PROPERTY = re.compile(
    rf"(?:Is)?(?:{_CATEGORY})|(?i:gc|general_category)=(?:{_CATEGORY})"
    rf"|(?:Is|(?i:sc|script)=){_SCRIPT}|(?:In|(?i:blk|block)=){_BLOCK}"
    "|L1|all|ASCII|Alnum|Alpha|Blank|Cntrl|Digit|Graph|Lower|Print|Punct|Space|Upper|XDigit"
    "|Is(?i:alphabetic|letter|ideographic|lowercase|uppercase|titlecase|white_space|control"
    "|punctuation|hex_digit|assigned|digit|alnum|blank|graph|print|word)"
    "|java(?:(?:Lower|Upper|Title)Case|Alphabetic|Ideographic|Digit|Defined|Letter(?:OrDigit)?"
    "|SpaceChar|Whitespace|ISOControl|Mirrored)"
)
