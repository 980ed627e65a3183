"""Patterns that Java reads: of times, and regular expressions; checked here without a Java.

Both checks are strict: what they accept, Spark compiles. Of times: the letters that Spark parses of
`java.time.format.DateTimeFormatter` (sql-ref-datetime-pattern.html); of text: the grammar of
`java.util.regex.Pattern`, read from the inside out: what has been read becomes one mark.
"""

from __future__ import annotations

import re

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


_PROPERTY = (
    r"(?:(?:Is)?|(?i:gc|general_category)=)"
    "(?:[LMNPSZC]|L[Cultmo]|M[nce]|N[dlo]|P[cdsefio]|S[mcko]|Z[slp]|C[cfson])"
    "|(?:Is|(?i:sc|script)=)(?i:latin|greek|cyrillic|armenian|hebrew|arabic|devanagari|bengali"
    "|tamil|telugu|thai|georgian|hangul|hiragana|katakana|han|common)"
    "|(?:In|(?i:blk|block)=)(?i:greek|cyrillic|armenian|hebrew|arabic|thai|hiragana|katakana"
    "|basiclatin)|L1|all|ASCII|Alnum|Alpha|Blank|Cntrl|Digit|Graph|Lower|Print|Punct|Space|Upper"
    "|XDigit|Is(?i:alphabetic|letter|ideographic|lowercase|uppercase|titlecase|white_space|control"
    "|punctuation|hex_digit|assigned|digit|alnum|blank|graph|print|word)"
    "|java(?:(?:Lower|Upper|Title)Case|Alphabetic|Ideographic|Digit|Defined|Letter(?:OrDigit)?"
    "|SpaceChar|Whitespace|ISOControl|Mirrored)"
)
_ESCAPE = re.compile(
    rf"\\(?:(?P<set>[dDhHsSvVwW]|[pP](?:[LMNPSZC]|\{{(?:{_PROPERTY})\}}))"
    r"|(?P<reference>[1-9X])|(?P<place>[ABGzZR]|b\{g\}|b(?!\{))|(?P<name>k<)"
    r"|0(?P<octal>[0-3][0-7]{2}|[0-7]{1,2})|c(?P<control>[!-~])|u(?P<four>[0-9A-Fa-f]{4})"
    r"|x(?:(?P<two>[0-9A-Fa-f]{2})|\{(?P<hex>(?:10|[0-9A-Fa-f])?[0-9A-Fa-f]{1,4})\})"
    r"|(?P<other>[aefnrt]|[^A-Za-z0-9])|)",
    re.DOTALL,
)
_VALUES = {"a": 7, "e": 27, "f": 12, "n": 10, "r": 13, "t": 9}
_ESCAPED = 0xF0000
"""Added to the number of an ASCII character behind a backslash, which has no meaning of its own."""
_MARKS = {"set": "\U000f1000", "place": "\U000f1001", "reference": "\U000f1002", "name": "\\k<"}
_CLASS, _GROUP, _ENDLESS = "\U000f1003", "\U000f1004", "\U000f1005"

_QUOTED = re.compile(r"\\Q(.*?)\\E|\\.", re.DOTALL)
_COMMENTED = re.compile(r"\(\?[idmsuU]*x[idmsuxU]*\)")
_COMMENT = re.compile(
    r"(\\.)|[ \t\n\v\f\r]|#[^\n\r\u0085\u2028\u2029]*[\n\r\u0085\u2028\u2029]", re.DOTALL
)
# A comment without an end would hide the end of the group; some spaces part what is one.
_SPACED = re.compile(r"#|[*+?}] +[?+]|\( +\?|\(\?<?[A-Za-z0-9-]* |\{[0-9,]* ")
_INNER_CLASS = re.compile(r"\[\^?+(\]?+[^\[\]]*)\]")
_LETTER = "[^\\\\\U000f1000-\U000f1005]"
_MEMBER = re.compile(
    f"(?!^)&&(?=[^&])|(?!&&)(?:[{_MARKS['set']}{_CLASS}]"
    f"|(?P<first>{_LETTER})(?:-(?P<last>{_LETTER})|(?!-[^{_CLASS}])))",
    re.DOTALL,
)
_FLAGS = re.compile(r"\(\?[idmsuU]*(?:-[idmsuxU]*)?\)")
_NAMED = re.compile(r"\(\?<(?P<new>[A-Za-z][A-Za-z0-9]*)>|\\k<(?P<known>[A-Za-z0-9]+)>")
_INNER_GROUP = re.compile(
    r"\((?:\?(?P<kind>[:=!>]|<[=!]|[idmsuU]*(?:-[idmsuxU]*)?:)|\?<[A-Za-z0-9]+>)?(?P<body>[^()]*)\)"
)
_TIMES = r"\{\d{1,9}(?:,(?:\d{1,9})?)?\}"
_BODY = re.compile(rf"(?:[^*+?{{|()\[\\](?:(?:[*+?]|{_TIMES})[?+]?)?|\|)*")
_BOUNDED_BODY = re.compile(
    rf"(?:{_GROUP}(?:\?[?+]?)?|[^*+?{{|()\[\\{_MARKS['reference']}{_GROUP}{_ENDLESS}]"
    r"(?:(?:\?|\{\d{1,9}(?:,\d{1,9})?\})[?+]?)?|\|)*"
)
_HINTS = {
    "(?P<": "a named group is (?<name>…)", "(?P=": r"write \k<name>",
    "(?P>": "there is no recursion", "(?(": "there are no conditional groups",
    "(?#": "there are no comments but by (?x)", "(?x": "(?x) stands at the start",
    "(?<=": "it has no greatest length", "(?<!": "it has no greatest length",
    "(?<": "names are of letters and digits, each for one group", "{": r"a brace is \{",
}  # fmt: skip


def count_groups(pattern: str) -> int:
    """Returns the number of capturing groups of a regular expression of Java's.

    Raises:
        ValueError: Java does not compile it.
    """
    text = _QUOTED.sub(_unquote, pattern)
    if commented := _COMMENTED.match(text):
        text = _leave_out_comments(text[commented.end() :])
    text = _ESCAPE.sub(_read_escape, text)
    while inner := _INNER_CLASS.search(text):
        _check_class(inner)
        text = text[: inner.start()] + _CLASS + text[inner.end() :]
    for least, most in re.findall(r"\{(\d+),(\d+)\}", text):
        if int(most) < int(least):
            raise _refuse(f"{{{least},{most}}}")
    text = _read_names(_FLAGS.sub("|", text))
    groups = 0
    while inner := _INNER_GROUP.search(text):
        groups += inner["kind"] is None
        text = text[: inner.start()] + _read_group(inner) + text[inner.end() :]
    _check_body(text)
    return groups


def _leave_out_comments(text: str) -> str:
    text = _COMMENT.sub(lambda part: part[1] or " ", text)
    if wrong := _SPACED.search(re.sub(r"\\(?:[pPx]\{\w+\}|.)", "x", text, flags=re.DOTALL)):
        raise _refuse(wrong[0])
    return re.sub(r"(\\.)| ", lambda part: part[1] or "", text, flags=re.DOTALL)


def _unquote(found: re.Match[str]) -> str:
    return found[0] if found[1] is None else re.sub(r"[^A-Za-z0-9]", r"\\\g<0>", found[1])


def _read_escape(escape: re.Match[str]) -> str:
    kind = escape.lastgroup
    if kind is None:
        raise _refuse(escape.string[escape.start() :][:12])
    if kind in _MARKS:
        return _MARKS[kind]
    if kind == "control":
        number = ord(escape[kind]) ^ 64
    elif kind == "other":
        number = _VALUES.get(escape[kind], ord(escape[kind]))
    else:
        number = int(escape[kind], 8 if kind == "octal" else 16)
    return chr(number + _ESCAPED if number < 128 else number)


def _check_class(found: re.Match[str]) -> None:
    """Checks the members of a class by Java's rules, such as `[a-z&&[^aeiou]]`."""
    members, at = found[1], 0
    while at < len(members):
        member = _MEMBER.match(members, at)
        if member is None or (member["last"] and not _is_range(member)):
            raise _refuse(found[0])
        at = member.end()


def _is_range(member: re.Match[str]) -> bool:
    first, last = (ord(end) for end in (member["first"], member["last"]))
    return first % _ESCAPED <= last % _ESCAPED


def _read_names(text: str) -> str:
    """Checks that each name is given once, before it is referred to; references become marks."""
    names: set[str] = set()

    def read(found: re.Match[str]) -> str:
        new, known = found["new"], found["known"]
        if new in names or (new is None and known not in names):
            raise _refuse(found[0])
        names.add(new)
        return found[0] if new else _MARKS["reference"]

    return _NAMED.sub(read, text)


def _read_group(found: re.Match[str]) -> str:
    """Checks what a group holds; one behind `(?<=` has a greatest length."""
    body = found["body"]
    if body.startswith("?"):
        raise _refuse(found[0])
    _check_body(body)
    is_bounded = _BOUNDED_BODY.fullmatch(body) is not None
    if found["kind"] in ("<=", "<!") and not is_bounded:
        raise _refuse(found[0])
    return _GROUP if is_bounded else _ENDLESS


def _check_body(body: str) -> None:
    read = _BODY.match(body)
    rest = body if read is None else body[read.end() :]
    if rest:
        raise _refuse(rest)


def _refuse(text: str) -> ValueError:
    text = re.sub(f"[{_MARKS['set']}-{_ENDLESS}]", "…", text)
    shown = "".join(chr(ord(c) - _ESCAPED) if ord(c) >= _ESCAPED else c for c in text)
    hints = [f"; {hint}" for start, hint in _HINTS.items() if shown.startswith(start)]
    said = f"pattern: Java's regular expressions do not allow {shown!r}"
    return ValueError(said + "".join(hints[:1]))
