"""Find words and docstrings that slow a reader down: `python -m testing.wording [PATH …]` (default: all tracked files).

Each word on the list has an ordinary replacement, which the program prints. A function's docstring starts with a verb,
and no docstring starts with a preposition or a question word.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    r"tell|tells|told|telling": "alert, report, detect; distinguish (tell apart)",
    r"in vain": "false, unnecessarily",
    r"dear|dearer|dearest": "costly, larger",
    r"hold(?:s|ing)? (?:\w+ ){1,3}up|held up|holds up|held back by|(?:hold|holds|held) (?:\w+ ){0,3}back": "slow down",
    r"held down": "throttled",
    r"beside": "next to, compared with, in addition to",
    r"anew": "again",
    r"nobody|somebody|anybody": "no process, no rank, a user (say who)",
    r"in (?:the|its|their) place of": "instead of",
    r"what is left on": "memory still allocated on",
    r"house|doors": "code base, extension points",
    r"a processor|processors?'s? time|processor time": "CPU, CPU time",
    r"intruders?": "foreign process",
    r"by lot": "random",
    r"seldom": "rarely",
    r"thereby|whence|hereby|thereof|wherein|therein": "(a plain clause)",
    r"nought|aught|ought": "0, should",
    r"lest|for good|at a stroke|by and by|as it were": "(an ordinary phrase)",
    r"is well|are well|was well|be well": "healthy, recovered",
    r"eyes?|strangers?": "(what is meant)",
}
BANNED = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): plain for pattern, plain in WORDS.items()}
ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
TEXT = re.compile(r"(\.(py|md|ya?ml|toml|sh|html|js|css|service|conf|tmpl)|Makefile)$")
# The changelog has the old names, and fixtures are as they were recorded.
EXEMPT = re.compile(r"^(CHANGELOG\.md|.*wording\.py|docs/measurements/slurm\.md)$")
# A method of Python's files; the Unix user.
KEPT = re.compile(r"\.tell\(|NOBODY|[\"'`=]nobody\b|user nobody")
FIRST_WORDS = re.compile(
    r"about|above|after|all|as|at|because|before|beside|between|by|during|each|for|from|how|if|in|into|its|of|on|once|one|"
    r"only|since|so|such|than|that|these|this|those|to|under|until|upon|what|when|where|whether|which|while|who|whom|whose|"
    r"why|with|within|without"
)
# What a class, module or property may begin with as well: "One value, end to end", "All ranks of a run".
NOUNS = frozenset(("all", "each", "one"))


def main(paths: list[str]) -> int:
    """Print the findings, one line each. Returns the exit status: 1 if there are any."""
    found = [line for path in tracked(paths) for line in check(path)]
    print(*found, f"{len(found)} in all", sep="\n")
    return bool(found)


def tracked(paths: list[str]) -> list[Path]:
    """Return the text files that git tracks below the paths, relative to the repository's root."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if TEXT.search(name) and not EXEMPT.match(name)]
    return [Path(name) for name in names if not (ROOT / name).is_symlink()]


def check(path: Path) -> Iterator[str]:
    """Yield `path:line: finding` for each word and docstring of a file."""
    text = (ROOT / path).read_text()
    for number, line in enumerate(text.splitlines() if ANY.search(text.replace("_", " ")) else (), 1):
        spaced = KEPT.sub("", line).replace("_", " ")  # names consist of words, too
        for pattern, plain in BANNED.items():
            for match in pattern.finditer(spaced):
                yield f"{path}:{number}: {match[0]!r}: {plain}"
    if path.suffix == ".py":
        yield from (f"{path}:{number}: docstring begins with {word!r}" for number, word in docstrings(text))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and first word of each docstring that does not begin with a subject or a verb."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node) or ""
        word = re.split(r"[^\w'`]", text, maxsplit=1)[0].lower()
        if FIRST_WORDS.fullmatch(word) and (word not in NOUNS or _is_function(node)):
            yield getattr(node, "lineno", 1), word


def _is_function(node: ast.AST) -> bool:
    """Return whether the node is a function that is no property."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
