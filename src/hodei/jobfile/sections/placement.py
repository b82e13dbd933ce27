"""Where a task may run: affinity, tolerations, backend and place, from either spelling to the model."""

from __future__ import annotations

from functools import lru_cache
from typing import cast, get_args

from hodei.jobfile import schema
from hodei.jobfile.names import did_you_mean, label_key, label_value, shown, word
from hodei.jobfile.values import said
from hodei.model.affinity import NodeTerm, Requirement, check_requirement, parse_selector
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, BackendChoice, PreferredTerm, Toleration
from hodei.model.node import Location, TaintEffect

Problems = list[tuple[str, str]]
FIELDS = ("metadata.name",)
EVERYTHING = Toleration(operator="Exists")


def affinity(form: schema.AffinityForm, at: str, problems: Problems) -> Affinity:
    if form.node_affinity is None:
        return Affinity(
            tuple(_term(text, f"{at}.required[{i}]", problems) for i, text in enumerate(form.required or ())),
            tuple(
                PreferredTerm(wish.weight, _term(wish.match, f"{at}.preferred[{i}].match", problems))
                for i, wish in enumerate(form.preferred or ())
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
            PreferredTerm(wish.weight, _kubernetes_term(wish.preference, f"{preferred_at}[{i}].preference", problems))
            for i, wish in enumerate(block.preferred or ())
        ),
    )


def toleration(given: str | schema.TolerationForm) -> Toleration:
    """One toleration; InvalidInput where Kubernetes would refuse it too."""
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
    if given.specific is not None and given.preferred is not None:
        raise InvalidInput("give one of specific and preferred, not both")
    if given.specific is not None:
        return BackendChoice("specific", tuple(map(word, given.specific)), avoid=avoid)
    if given.preferred is None:
        if not avoid:
            raise InvalidInput("give one of specific, preferred and avoid")
        return BackendChoice(avoid=avoid)
    names = tuple(map(word, given.preferred))
    weights = tuple(given.preferred.values()) if isinstance(given.preferred, dict) else ()
    return BackendChoice("preferred", names, weights, avoid)


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
            f"{shown(effect)} is not an effect: {', '.join(known)}{did_you_mean(effect, known)}",
            hint="write key, key:Effect or key=value:Effect",
        )
    key, equals, value = taint.partition("=")
    return Toleration(label_key(key), "Equal" if equals else "Exists", label_value(value), cast("TaintEffect", effect))


def _term(selector: str, at: str, problems: Problems) -> NodeTerm:
    try:
        return _parsed(selector)
    except InvalidInput as error:
        problems.append((at, said(error)))
        return NodeTerm()


@lru_cache(maxsize=1024)
def _parsed(selector: str) -> NodeTerm:
    requirements = parse_selector(selector)
    if not requirements:
        raise InvalidInput("an empty selector", hint="for example: zone in (a, b), disk=ssd, !spot")
    return NodeTerm(tuple(_checked(requirement) for requirement in requirements))


def _kubernetes_term(term: schema.SelectorTerm, at: str, problems: Problems) -> NodeTerm:
    if not term.match_expressions and not term.match_fields:
        problems.append((at, "a term without conditions matches no node; add matchExpressions or leave the term out"))
    return NodeTerm(
        tuple(
            _expression(e, f"{at}.matchExpressions[{i}]", problems) for i, e in enumerate(term.match_expressions or ())
        ),
        tuple(
            _expression(e, f"{at}.matchFields[{i}]", problems, FIELDS) for i, e in enumerate(term.match_fields or ())
        ),
    )


def _expression(form: schema.Expression, at: str, problems: Problems, known: tuple[str, ...] = ()) -> Requirement:
    requirement = Requirement(form.key, form.operator, tuple(form.values or ()))
    try:
        if known and form.key not in known:
            raise InvalidInput(f"unknown field {shown(form.key)}; known: {', '.join(known)}")
        return check_requirement(requirement if known else _checked(requirement))
    except InvalidInput as error:
        problems.append((at, said(error)))
        return requirement


def _checked(requirement: Requirement) -> Requirement:
    label_key(requirement.key)
    for value in requirement.values if requirement.operator in ("In", "NotIn") else ():
        label_value(value)
    return requirement
