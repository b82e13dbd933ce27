"""Node affinity, tolerations, `backend` and `near`: parser and renderer. Their types are in `schema`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast, get_args

from hodei.jobfile import schema
from hodei.jobfile.values import (
    Expression,
    Problems,
    check_requirement_names,
    did_you_mean,
    error_text,
    requirement_document,
    try_parse,
)
from hodei.model.affinity import NodeTerm, Requirement, check_requirement, parse_selector
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, BackendChoice, PreferredTerm, Toleration
from hodei.model.names import label_key, label_value, safe_repr, word
from hodei.model.node import Location, TaintEffect
from hodei.model.resources import format_duration, parse_duration_ms

FIELDS = ("metadata.name",)
TOLERATE_ALL = Toleration(operator="Exists")


def affinity(form: schema.AffinityForm, at: str, problems: Problems) -> Affinity:
    if form.node_affinity is None:
        return Affinity(
            tuple(_term(text, f"{at}.required[{i}]", problems) for i, text in enumerate(form.required or ())),
            tuple(
                PreferredTerm(one.weight, _term(one.match, f"{at}.preferred[{i}].match", problems))
                for i, one in enumerate(form.preferred or ())
            ),
        )
    if form.required is not None or form.preferred is not None:
        problems.append((at, "give either required and preferred, or nodeAffinity, not both"))
    block, at = form.node_affinity, f"{at}.nodeAffinity"
    terms = block.required.node_selector_terms if block.required else ()
    required_at = f"{at}.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    preferred_at = f"{at}.preferredDuringSchedulingIgnoredDuringExecution"
    return Affinity(
        tuple(_kubernetes_term(term, f"{required_at}[{i}]", problems) for i, term in enumerate(terms)),
        tuple(
            PreferredTerm(one.weight, _kubernetes_term(one.preference, f"{preferred_at}[{i}].preference", problems))
            for i, one in enumerate(block.preferred or ())
        ),
    )


def toleration(given: str | schema.TolerationForm) -> Toleration:
    """InvalidInput where Kubernetes would refuse it too."""
    if isinstance(given, str):
        return _short_toleration(given)
    key, value, effect = given.key or "", given.value or "", given.effect or ""
    operator = given.operator or "Equal"
    if key:
        label_key(key)
    elif operator != "Exists":
        raise InvalidInput("a toleration without a key needs operator: Exists")
    if operator == "Exists" and value:
        raise InvalidInput("operator Exists takes no value")
    if given.seconds is not None and effect != "NoExecute":
        raise InvalidInput("tolerationSeconds needs effect: NoExecute")
    return Toleration(key, operator, label_value(value), effect, given.seconds)


def backend(given: str | schema.BackendForm) -> BackendChoice:
    if isinstance(given, str):
        return BackendChoice() if given == "any" else _specific(given)
    avoid = tuple(map(word, given.avoid or ()))
    offline_ms = parse_duration_ms(given.offline) if given.offline is not None else 0
    if given.specific is not None and given.preferred is not None:
        raise InvalidInput("give one of specific and preferred, not both")
    if given.specific is not None:
        return BackendChoice("specific", tuple(map(word, given.specific)), avoid=avoid, offline_ms=offline_ms)
    if given.preferred is None:
        if not avoid and not offline_ms:
            raise InvalidInput("give one of specific, preferred, avoid and offline")
        return BackendChoice(avoid=avoid, offline_ms=offline_ms)
    names = tuple(map(word, given.preferred))
    weights = tuple(given.preferred.values()) if isinstance(given.preferred, dict) else ()
    return BackendChoice("preferred", names, weights, avoid, offline_ms)


def near(form: schema.NearForm) -> Location:
    if (form.lat is None) != (form.lng is None):
        raise InvalidInput("lat and lng belong together; give both or neither")
    return Location(
        region=word(form.region) if form.region else "",
        zone=word(form.zone) if form.zone else "",
        datacenter=word(form.datacenter) if form.datacenter else "",
        rack=word(form.rack) if form.rack else "",
        lat_micro=None if form.lat is None else round(form.lat * 1e6),
        lng_micro=None if form.lng is None else round(form.lng * 1e6),
    )


@lru_cache(maxsize=256)
def _specific(name: str) -> BackendChoice:
    return BackendChoice("specific", (word(name),))


@lru_cache(maxsize=1024)
def _short_toleration(text: str) -> Toleration:
    taint, colon, effect = text.strip().rpartition(":")
    if not colon:
        taint, effect = effect, ""
    elif effect not in get_args(TaintEffect):
        known = get_args(TaintEffect)
        raise InvalidInput(
            f"{safe_repr(effect)} is not an effect: {', '.join(known)}{did_you_mean(effect, known)}",
            hint="write key, key:Effect or key=value:Effect",
        )
    key, equals, value = taint.partition("=")
    return Toleration(label_key(key), "Equal" if equals else "Exists", label_value(value), cast("TaintEffect", effect))


def _term(selector: str, at: str, problems: Problems) -> NodeTerm:
    return try_parse(problems, at, _selector_term, selector, NodeTerm())


@lru_cache(maxsize=1024)
def _selector_term(selector: str) -> NodeTerm:
    requirements = parse_selector(selector)
    if not requirements:
        raise InvalidInput("an empty selector", hint="for example: zone in (a, b), disk=ssd, !spot")
    return NodeTerm(tuple(map(check_requirement_names, requirements)))


def _kubernetes_term(term: schema.SelectorTerm, at: str, problems: Problems) -> NodeTerm:
    if not term.match_expressions and not term.match_fields:
        problems.append((at, "a term without conditions matches no node; add matchExpressions or remove the term"))
    return NodeTerm(
        tuple(
            _expression(e, f"{at}.matchExpressions[{i}]", problems) for i, e in enumerate(term.match_expressions or ())
        ),
        tuple(
            _expression(e, f"{at}.matchFields[{i}]", problems, FIELDS) for i, e in enumerate(term.match_fields or ())
        ),
    )


def _expression(form: Expression, at: str, problems: Problems, known: tuple[str, ...] = ()) -> Requirement:
    requirement = Requirement(form.key, form.operator, tuple(form.values or ()))
    try:
        if known and form.key not in known:
            raise InvalidInput(f"unknown field {safe_repr(form.key)}; known: {', '.join(known)}")
        return check_requirement(requirement if known else check_requirement_names(requirement))
    except InvalidInput as error:
        problems.append((at, error_text(error)))
        return requirement


def toleration_document(toleration: Toleration) -> dict[str, Any]:
    out: dict[str, Any] = {"key": toleration.key} if toleration.key else {}
    out["operator"] = toleration.operator
    out |= {key: value for key, value in (("value", toleration.value), ("effect", toleration.effect)) if value}
    if toleration.seconds is not None:
        out["tolerationSeconds"] = toleration.seconds
    return out


def affinity_document(affinity: Affinity) -> dict[str, Any]:
    """Selectors if they can express it, else Kubernetes' nodeAffinity."""
    terms = [*affinity.required, *(preferred.term for preferred in affinity.preferred)]
    block: dict[str, Any] = {}
    if all(map(_is_selector, terms)):
        if affinity.required:
            block["required"] = [str(term) for term in affinity.required]
        if affinity.preferred:
            block["preferred"] = [{"weight": one.weight, "match": str(one.term)} for one in affinity.preferred]
        return block
    if affinity.required:
        block["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [_term_document(term) for term in affinity.required]
        }
    if affinity.preferred:
        block["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": one.weight, "preference": _term_document(one.term)} for one in affinity.preferred
        ]
    return {"nodeAffinity": block}


def _is_selector(term: NodeTerm) -> bool:
    try:
        return not term.fields and len(str(term)) <= 1024 and parse_selector(str(term)) == term.labels
    except InvalidInput:
        return False


def _term_document(term: NodeTerm) -> dict[str, Any]:
    pairs = (("matchExpressions", term.labels), ("matchFields", term.fields))
    return {key: list(map(requirement_document, requirements)) for key, requirements in pairs if requirements}


def backend_document(choice: BackendChoice) -> Any:
    out: dict[str, Any] = {}
    if choice.mode != "any":
        weights = dict(zip(choice.names, choice.weights, strict=False))
        out[choice.mode] = weights or list(choice.names)
    if choice.avoid:
        out["avoid"] = list(choice.avoid)
    if choice.offline_ms:
        out["offline"] = format_duration(choice.offline_ms)
    return out or ""
