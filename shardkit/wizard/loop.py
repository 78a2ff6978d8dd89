"""The one loop that asks: forward, back, and straight to one question from the review."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.errors import ModelError
from shardkit.wizard.answers import answer_of, settle, typed
from shardkit.wizard.model import ModelReader
from shardkit.wizard.prompter import Back, Prompt, Prompter
from shardkit.wizard.questions import QUESTIONS, Question, by_key, is_asked, show
from shardkit.wizard.situation import Situation


@dataclass
class Session:
    """What lives as long as the wizard: what is known, what was answered, and the model that is being read."""

    prompter: Prompter
    start: Situation
    reader: ModelReader
    given: dict[str, Any] = field(default_factory=dict)
    model_is_asked: bool = True
    on_answer: Callable[[Mapping[str, Any]], None] = lambda given: None
    """Called with all answers after each; keeps the draft."""

    def situation(self, until: str | None = None) -> Situation:
        """What is known now, with every answer settled; up to the question `until` where one is named."""
        return settle(self.start, self.given, until)


def ask_all(session: Session, skip_given: bool = False) -> None:
    """Ask every question on the way to the review; of a resumed session only those after the answered ones.
    Back at the first one asks it again."""
    trail: list[Question] = []
    problem = ""
    question = _next(session, None)
    while skip_given and question is not None and question.key in session.given:
        trail.append(question)
        question = _next(session, question)
    while question is not None:
        try:
            ask(session, question, problem)
            problem = ""
            trail.append(question)
            question = _next(session, question)
        except Back:
            problem = ""
            question = trail.pop() if trail else question
        except ModelError as error:
            problem = without_model(session, error)
            trail, question = [], by_key("model")


def ask_one(session: Session, key: str) -> None:
    """Ask one question again, then those that only now have a meaning or lost their answer. Back changes nothing."""
    before = dict(session.given)
    known = dict(session.situation().answers)
    problem = ""
    try:
        question: Question | None = by_key(key)
        while question is not None:
            try:
                ask(session, question, problem)
                known[question.key] = session.given[question.key]
                question = _changed(session, known)
            except ModelError as error:
                problem, question = without_model(session, error), by_key("model")
    except Back:
        session.given.clear()
        session.given.update(before)
        session.reader.begin(before.get("model"))


def without_model(session: Session, error: ModelError) -> str:
    """Forget a model that cannot be read, so that Enter goes on without one; what to tell about it."""
    session.model_is_asked = True
    session.given.pop("model", None)
    session.reader.begin(None)
    return str(error)


def _next(session: Session, after: Question | None) -> Question | None:
    """The next screen after a question."""
    rest = QUESTIONS if after is None else QUESTIONS[QUESTIONS.index(after) + 1 :]
    for question in rest:
        situation = session.situation(until=question.key)
        wanted = question.key != "model" or session.model_is_asked
        if wanted and question.applies(situation) and is_asked(question, situation):
            return question
    return None


def _changed(session: Session, known: Mapping[str, Any]) -> Question | None:
    """The first screen that had no answer before, or whose given answer is not possible any more."""
    settled = session.situation().answers
    for question in QUESTIONS:
        if question.key in settled and is_asked(question, session.situation(until=question.key)):
            lost = question.key in session.given and session.given[question.key] != settled[question.key]
            if question.key != "model" and (question.key not in known or lost):
                return question
    return None


def ask(session: Session, question: Question, problem: str = "") -> None:
    """Put one question, check the answer, keep it. Raises Back; ModelError where the model cannot be read."""
    if question.needs_model:
        wait_for_model(session)
    situation = session.situation(until=question.key)
    value = _put(session, question, situation, problem)
    session.given[question.key] = value
    if question.key == "model":
        session.start = replace(session.start, model=None)
        session.reader.begin(value)
    note = question.note(situation, value)
    session.prompter.say(f"  {question.name}: {shown(question, situation, value)}" + (f" ({note})" if note else ""))
    session.on_answer(session.given)


def shown(question: Question, situation: Situation, value: Any) -> str:
    """An answer as the person saw it: the option's own words where it is one."""
    if question.kind == "choose":
        return next((option.label for option in question.options(situation) if option.value == value), show(value))
    return show(value)


def wait_for_model(session: Session) -> None:
    """Have what is known of the model, or none, before a question that shows it."""
    if session.reader.is_reading():
        session.prompter.say(f"  reading the model {session.reader.spec} ...")
    had = session.start.model
    session.start = replace(session.start, model=session.reader.result())
    if session.start.model is not None and had is None:
        session.prompter.say(f"  model: {session.start.model.text}")


def _put(session: Session, question: Question, situation: Situation, problem: str) -> Any:
    present = answer_of(question, situation, session.given)
    options = question.options(situation)
    reason = _reason(session, question, situation, present)
    prompt = Prompt(question.title, tuple(question.lines(situation)), problem, question.help)
    if question.kind == "choose":
        return session.prompter.choose(_with_reason(prompt, reason), options, present)
    if question.kind == "several" and options:
        return session.prompter.choose_many(prompt, options, present)
    return _put_text(session.prompter, question, situation, _with_reason(prompt, reason), present)


def _reason(session: Session, question: Question, situation: Situation, present: Any) -> str:
    """What Enter takes and why; empty where it keeps an answer that was given."""
    default = question.default(situation)
    if question.key in session.given and present != default.value:
        return ""
    return f"{shown(question, situation, default.value)}: {default.reason}"


def _with_reason(prompt: Prompt, reason: str) -> Prompt:
    return replace(prompt, lines=(f"Enter takes {reason}", *prompt.lines)) if reason else prompt


def _put_text(prompter: Prompter, question: Question, situation: Situation, prompt: Prompt, present: Any) -> Any:
    shown = typed(question, present)
    while True:
        answer = prompter.text(prompt, shown)
        if answer == shown:
            return present
        try:
            return question.check(situation, answer)
        except ValueError as error:
            prompt = replace(prompt, problem=str(error))
