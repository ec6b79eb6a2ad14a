"""Pages of results, their tables, and the committed results that they quote."""

import functools
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
MODELS = ("gpt_117m", "gpt_345m", "bert_base")
QUARTILES = ("median", "lower_quartile", "upper_quartile")


@functools.cache
def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def tables(page: str) -> dict[str, dict[str, list[str]]]:
    """Returns the other cells of each row of a page's tables, by heading and first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in re.split(r"^##+ ", (ROOT / page).read_text("utf-8"), flags=re.M):
        rows = re.findall(r"^\| *(.*?) *\|(.*)\|$", part, re.M)
        found[part.splitlines()[0]] = {
            first.replace("`", ""): [cell.strip() for cell in rest.split("|")]
            for first, rest in rows[2:]
        }
    return found


PAGE = tables("docs/results.md")
ASKED = PAGE["Summary"]
README = tables("README.md")["What jaxmem does, and what you would use instead"]


def numbers(text: str) -> list[str]:
    """Returns the numbers of a cell. Numbers with a power of ten are written as in Python."""
    powers = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
    text = re.sub(r" × 10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", lambda m: "e" + m[1].translate(powers), text)
    return re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e-?\d+)?", text.replace("−", "-"))


def quotes(cell: str, *values: float) -> bool:
    """Whether the first numbers of a cell equal `values`, each rounded to the cell's digits."""
    texts = numbers(cell)[: len(values)]
    assert len(texts) == len(values), cell
    return all(abs(float(t) - v) <= 0.5001 * _last_digit(t) for t, v in zip(texts, values))


def _last_digit(text: str) -> float:
    mantissa, _, power = text.partition("e")
    return 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))


def answer(words: str) -> str:
    """Returns the summary's answer to the only question with these words."""
    (found,) = (cells[0] for question, cells in ASKED.items() if words in question)
    return found
