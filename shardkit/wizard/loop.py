"""The loop that asks: forward, back, and a single question from the review."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from shardkit.errors import ModelError, UsageError
from shardkit.model.adapters import adapted
from shardkit.model.describe import ModelDescription
from shardkit.model.sources import describe
from shardkit.wizard import conditions
from shardkit.wizard.answers import answer_of, settle, typed, walk
from shardkit.wizard.prompter import Back, Prompt, Prompter
from shardkit.wizard.question import Question, show
from shardkit.wizard.questions import QUESTIONS, by_key
from shardkit.wizard.situation import Situation

MODEL_TIMEOUT_S = 120.0


@dataclass
class Conversation:
    """The state of the wizard: what is known, the answers, and the model."""

    prompter: Prompter
    start: Situation
    given: dict[str, Any] = field(default_factory=dict)
    models: dict[str, ModelDescription] = field(default_factory=dict)
    """Those that were read, by their specifications."""
    model_is_asked: bool = True
    model_problem: str = ""
    """Why the model given at the start could not be read."""
    on_answer: Callable[[Mapping[str, Any]], None] = lambda given: None
    """Called with all answers after each one; stores the draft."""

    def situation(self, until: str | None = None) -> Situation:
        """The current situation with settled answers, up to the question `until` if given."""
        return settle(self.start, self.given, until)

    def walk(self) -> Iterator[tuple[Question, Situation]]:
        """All questions in order, each with its situation."""
        return walk(self.start, self.given)


def ask_all(session: Conversation) -> None:
    """Asks every question before the review, after those that are answered, as in a resumed session. Back at the first
    one repeats it. Where an earlier answer changes, later ones that were the default take the new default."""
    trail: list[Question] = []
    question = _next(session, None)
    while question is not None and question.key in session.given:
        trail.append(question)
        question = _next(session, question)
    while question is not None:
        try:
            _ask_and_take_defaults(session, question, _at_default(session))
            trail.append(question)
            question = _next(session, question)
        except Back:
            question = trail.pop() if trail else question


def ask_one(session: Conversation, key: str) -> None:
    """Asks one question again, then those that apply only now or whose answer became impossible. Answers that were the
    default take the new default. Back changes nothing."""
    before, model = dict(session.given), session.start.model
    former = session.situation().answers
    known, usual, asked = _asked(session), _at_default(session), set()
    try:
        question: Question | None = by_key(key)
        while question is not None:
            _ask_and_take_defaults(session, question, usual)
            known[question.key] = session.given[question.key]
            asked.add(question.key)
            question = _first_changed(session, known)
    except Back:
        session.given.clear()
        session.given.update(before)
        session.start = replace(session.start, model=model)
        session.on_answer(session.given)
    else:
        _say_what_followed(session, former, asked)


def _ask_and_take_defaults(session: Conversation, question: Question, usual: set[str]) -> None:
    """Asks one question; then the others in `usual` get the default that they have with this answer. Raises Back."""
    ask(session, question)
    usual.discard(question.key)
    _take_defaults(session, usual)
    session.on_answer(session.given)


def read_model(session: Conversation) -> str:
    """Reads the given model, if any; returns its description. Raises ModelError, and drops it, where it cannot be
    read."""
    spec = session.given.get("model")
    try:
        found = None if spec is None else _read(session, spec)
    except ModelError:
        session.model_is_asked = True
        del session.given["model"]
        session.start = replace(session.start, model=None)
        raise
    session.start = replace(session.start, model=found)
    return found.text if found is not None else ""


def _read(session: Conversation, spec: str) -> ModelDescription:
    """Reads the model in a child process, if it was not read before."""
    if spec not in session.models:
        with session.prompter.waiting(f"reading the model {spec}"):
            try:
                found = describe(spec, MODEL_TIMEOUT_S, session.start.folder)
                if session.start.adapters is not None:
                    adapted(found, session.start.adapters)
                session.models[spec] = found
            except ModelError:
                raise
            except UsageError as error:  # of the adapters
                raise ModelError(str(error)) from None
            except Exception as error:
                raise ModelError(f"--model {spec}: cannot be read ({error}); leave it out to continue.") from error
    return session.models[spec]


def _next(session: Conversation, after: Question | None) -> Question | None:
    """The next question to ask."""
    first = 0 if after is None else QUESTIONS.index(after) + 1
    for question, situation in islice(session.walk(), first, None):
        wanted = question.key != "model" or session.model_is_asked
        if wanted and question.applies(situation) and question.asked(situation):
            return question
    return None


def _asked(session: Conversation) -> dict[str, Any]:
    """The answers of the questions asked before the review."""
    return {
        question.key: answer_of(question, situation, session.given)
        for question, situation in session.walk()
        if question.applies(situation) and question.asked(situation)
    }


def _at_default(session: Conversation) -> set[str]:
    """The questions whose given answer is the default."""
    return {
        question.key
        for question, situation in session.walk()
        if question.key in session.given and session.given[question.key] == question.default(situation).value
    }


def _take_defaults(session: Conversation, usual: set[str]) -> None:
    """Sets these questions to their current default."""
    for question, situation in session.walk():
        if question.key in usual and question.applies(situation):
            session.given[question.key] = question.default(situation).value


def _say_what_followed(session: Conversation, former: Mapping[str, Any], asked: set[str]) -> None:
    """Names the answers that changed without being asked: defaults, and what is not possible any more."""
    for question, situation in session.walk():
        if question.key in asked or not (question.key in former.keys() & session.given and question.applies(situation)):
            continue
        value = answer_of(question, situation, session.given)
        if value != former[question.key]:
            reason = question.default(situation).reason
            session.prompter.say(f"  {question.name} is now {shown(question, situation, value)}: {reason}")


def _first_changed(session: Conversation, known: Mapping[str, Any]) -> Question | None:
    """The first question that was not asked before, or whose given answer is no longer possible."""
    for question, situation in session.walk():
        if question.key == "model" or not (question.applies(situation) and question.asked(situation)):
            continue
        lost = session.given.get(question.key, ...) not in (..., answer_of(question, situation, session.given))
        if question.key not in known or lost:
            return question
    return None


def ask(session: Conversation, question: Question) -> None:
    """Asks one question, checks and stores the answer. Raises Back."""
    situation = session.situation(until=question.key)
    if question.key == "model":
        value, note = _ask_model(session, question, situation)
    else:
        value = session.given[question.key] = _answer_to(session, question, situation, "")
        note = question.note(situation, value)
    session.prompter.say(f"  {question.name}: {shown(question, situation, value)}" + (f" ({note})" if note else ""))
    if question.key == "details" and value == "suggested":
        _forget_details(session)


def _ask_model(session: Conversation, question: Question, situation: Situation) -> tuple[str | None, str]:
    """(the answer, the description). A model that cannot be read is asked for again."""
    while True:
        value = session.given[question.key] = _answer_to(session, question, situation, session.model_problem)
        try:
            found = read_model(session)
            session.model_problem = ""
            return value, found
        except ModelError as error:
            session.model_problem = str(error)


def _forget_details(session: Conversation) -> None:
    """Sets the details that were given to their default."""
    details = {question.key for question in QUESTIONS if question.asked is conditions.each_detail}
    _take_defaults(session, {key for key in details if session.given.pop(key, ...) is not ...})


def shown(question: Question, situation: Situation, value: Any) -> str:
    """An answer as shown to the user: the option's label if it is one."""
    if question.kind == "choose":
        return next((option.label for option in question.options(situation) if option.value == value), show(value))
    return show(value)


def _answer_to(session: Conversation, question: Question, situation: Situation, problem: str) -> Any:
    present = answer_of(question, situation, session.given)
    options = question.options(situation)
    enter = _enter(session, question, situation, present)
    prompt = Prompt(question.title, tuple(question.lines(situation)), problem, question.help, enter)
    if question.kind == "choose":
        return session.prompter.choose(prompt, options, present)
    if question.kind == "several" and options:
        return session.prompter.choose_many(replace(prompt, enter=""), options, present)
    return _typed_answer(session.prompter, question, situation, prompt, present)


def _enter(session: Conversation, question: Question, situation: Situation, present: Any) -> str:
    """The default and its reason; for typed answers, what Enter accepts or keeps."""
    default = question.default(situation)
    value = shown(question, situation, default.value)
    if question.key in session.given and present != default.value:
        return f"Enter keeps {shown(question, situation, present)}; the default is {value}: {default.reason}"
    return (
        f"Default: {value} ({default.reason})"
        if question.kind == "choose"
        else f"Enter takes {value}: {default.reason}"
    )


def _typed_answer(prompter: Prompter, question: Question, situation: Situation, prompt: Prompt, present: Any) -> Any:
    shown = typed(question, present)
    while True:
        answer = prompter.text(prompt, shown)
        if answer == shown:
            return present
        try:
            return question.read(situation, answer)
        except ValueError as error:
            prompt = replace(prompt, problem=str(error))
