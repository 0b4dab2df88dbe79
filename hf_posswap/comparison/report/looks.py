"""The style of each model on the page: `hf_posswap.plotting.styles` as CSS classes, SVG marks and a style sheet.

`document` puts it around every page. The page loads no external resources, and follows the light or dark preference.
"""

from __future__ import annotations

from importlib.resources import files

from hf_posswap.comparison.report.conclusion import is_control_entry
from hf_posswap.comparison.report.markup import Markup, tag
from hf_posswap.comparison.report.results import Results, SchemeEntry
from hf_posswap.plotting.styles import (
    BASE,
    CONTROL,
    SLIDING,
    STYLES,
    distinct_numbers,
    scheme_number,
    stroke_of,
    style_of,
)

_DASH = "M-6,0H6"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The content security policy: a page loads no external resources."""


def look(number: int) -> str:
    """Return the CSS classes of the `number`-th model.

    Example:
        >>> look(2), look(10), look(18), look(SLIDING)
        ('c2', 'c2 dashed', 'c2 dotted', 'ref')
    """
    if number == SLIDING:
        return "ref"
    return f"c{number % len(STYLES)} {stroke_of(number)}".removesuffix(" solid")


def model_numbers(results: Results) -> dict[str, int]:
    """Return the number of each model, which selects its style: that of its scheme, the base's, or the control's.

    A number is used once: of several models with the same scheme, the first has the scheme's number.

    Example:
        >>> plans = {"base": None, "control": None, "a": "rope", "b": "alibi", "c": "rope"}
        >>> models = {name: {"plan": scheme and {"scheme": {"name": scheme}}} for name, scheme in plans.items()}
        >>> list(model_numbers({"models": models}).values())
        [0, 1, 2, 3, 4]
    """
    models, preferred = results["models"], list[int | None]()
    for name, model in models.items():
        unswapped = CONTROL if is_control_entry(name, model) else BASE
        plan = model["plan"]
        preferred.append(unswapped if plan is None else scheme_number(scheme_name(plan["scheme"])))
    return dict(zip(models, distinct_numbers(preferred), strict=True))


def scheme_name(scheme: SchemeEntry) -> str:
    """Return the name of a scheme; layers with one scheme and different fields count as that scheme.

    Example:
        >>> layers = {"0": {"name": "alibi", "slopes": [0.5]}, "1": {"name": "alibi", "slopes": [0.25]}}
        >>> scheme_name({"name": "per_layer", "layers": layers}), scheme_name({"name": "rope"})
        ('alibi', 'rope')
    """
    names = {layer["name"] for layer in scheme["layers"].values()} if scheme["name"] == "per_layer" else set()
    return str(names.pop() if len(names) == 1 else scheme["name"])


def shape(number: int) -> str:
    """Return the mark of the `number`-th model as SVG path data around (0, 0)."""
    return _DASH if number == SLIDING else style_of(number).path


def mark(number: int) -> Markup:
    """Return the mark of the `number`-th model, to be put before its name.

    Example:
        >>> mark(0).startswith('<svg class="mark c0" viewBox="-6 -6 12 12" aria-hidden="true"><path d="M')
        True
    """
    path = tag("path", d=shape(number))
    return tag("svg", path, class_=f"mark {look(number)}", viewBox="-6 -6 12 12", aria_hidden="true")


def colours() -> Markup:
    """Return the style sheet of the models' colours, for light and dark pages."""
    light = " ".join(f"--c{number}: {style.colour};" for number, style in enumerate(STYLES))
    dark = " ".join(f"--c{number}: {style.dark};" for number, style in enumerate(STYLES))
    classes = " ".join(f".c{number} {{ --c: var(--c{number}); }}" for number in range(len(STYLES)))
    on_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return Markup(f":root {{ {light} }}\n{on_dark}\n{classes}\n")


def style_sheet() -> Markup:
    """Return the style sheet of every page: the models' colours, and the layout."""
    return Markup(colours() + files("hf_posswap.comparison.report").joinpath("page.css").read_text(encoding="utf-8"))


def document(title: str, *body: Markup, style: Markup | None = None) -> str:
    """Return the document.

    Args:
        title: title of the page.
        body: content of the body, including scripts.
        style: further styles, in addition to the common style sheet.

    Example:
        >>> document("A page", tag("p", "It says so."))[:33]
        '<!doctype html>\\n<html lang="en"><'
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title}: hf_posswap"),
        tag("style", style_sheet(), style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"
