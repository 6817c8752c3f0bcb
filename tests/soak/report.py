from typing import Any


def summary(o: Any) -> dict[str, Any]:
    return {"checks": []}


def page(f: Any) -> str:
    return ""
