"""The price of a GPU-hour, and what GPU-hours cost."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as sdk

PRICE = sdk.VariableModel(
    type_val=sdk.VariableType.TEXTBOX,
    name="price",
    label="Price of a GPU-hour",
    description="In any currency, such as 2.5. Without a price no costs are shown.",
    query="",
    current=sdk.VariableOption(text="", value=""),
)


def priced(gpu_hours: str) -> str:
    """Return the query of the money for these GPU-hours; it has no data without a price."""
    # `+ 0`: an empty price is 0, whose scalar is not a number, and no number is compared with that.
    return f"({gpu_hours}) * scalar(vector($price + 0) > 0) >= 0"
