"""How the output of a chat becomes a message: its grammar and its parser. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cluster.edge.families.formats import OutputContext, whole_format
from cluster.edge.families.grammar import (
    CallRules,
    answer_grammar,
    can_follow_reasoning,
    message_grammar,
)
from cluster.edge.families.lark import UnsupportedSchemaError
from cluster.edge.families.message import MAX_CALLS
from cluster.edge.families.parser import OutputParser
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from cluster.edge.fields import (
    bad_field,
)
from cluster.edge.structured_outputs import Grammar
from replicas.sampling_params import ReasoningBudget, ReasoningMarks, StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from cluster.edge.families.formats import ReasoningFormat, ReasoningTexts, ToolFormat
    from cluster.edge.openai import ModelCard
    from cluster.edge.tool_requests import ToolUse

BUDGET_FIELD = "thinking_token_budget"
PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt that show whether it has begun the reasoning."""


@dataclass(frozen=True, slots=True)
class MessageOutput:
    """Formats of a chat's output.

    Attributes:
        tools: Format of the calls; None if there can be none.
        reasoning: Format of the reasoning; None if it stays in the content.
        use: The request's tools.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    use: ToolUse

    @property
    def has_call_grammar(self) -> bool:
        """Return whether the grammar of the output is that of its calls."""
        return self.tools is not None and self.use.is_constrained

    def shortened(self, prompt_end: str) -> str:
        """Return a text that leads to the same grammar as the end of a prompt."""
        whole = whole_format(self.tools, self.reasoning)
        if whole is not None:
            return whole.shortened(prompt_end)
        return "" if self.reasoning is None else self.reasoning.shortened(prompt_end)

    def grammar(
        self, own: Grammar | None, special_ids: Mapping[str, int], prompt_end: str = ""
    ) -> Grammar | None:
        """Return the grammar of the whole output; None if that is free.

        Required and strict calls need one, as does an answer with a grammar of its own, which
        decides only behind the reasoning. Source: vLLM 0.32, where structured output begins there.

        Args:
            own: The request's own grammar; has compiled by itself.
            special_ids: Token ids of the special tokens by text.
            prompt_end: Text of the prompt's last tokens.

        Raises:
            BadRequestError: The tools, or the request's own grammar, are too large, or no grammar
                can follow a tool's schema.
        """
        if own is not None:
            assert self.reasoning is not None
            text = answer_grammar(self.reasoning, own.spec, special_ids, prompt_end)
            return own if text is None else _checked(text, own.path)
        if not self.has_call_grammar:
            return None
        assert self.tools is not None
        rules = CallRules(self.use.tools, self.use.choice == "required", self.use.is_parallel)
        try:
            text = message_grammar(self.tools, self.reasoning, rules, special_ids, prompt_end)
        except UnsupportedSchemaError as error:
            text = f"cannot be followed by a grammar: the schema of an argument {error}"
            raise bad_field("tools", text) from error
        return _checked(text, "tools")

    def reasoning_budget(
        self,
        max_tokens: int,
        token_ids_of: Callable[[str], tuple[int, ...] | None],
        prompt_end: str,
    ) -> ReasoningBudget | None:
        """Return the limit of the reasoning; None if the output has no reasoning.

        Args:
            max_tokens: Most tokens of the reasoning.
            token_ids_of: Returns the tokens of a text; None if they depend on the text before it.
            prompt_end: Text of the prompt's last tokens.

        Raises:
            BadRequestError: The end of the reasoning cannot be forced.
        """
        assert self.reasoning is not None
        texts = self.reasoning.texts(prompt_end)
        if texts is None:
            return None
        if texts.may_repeat:
            text = "cannot be used: this model may reason again after the end; set reasoning_effort"
            raise bad_field(BUDGET_FIELD, text)
        marks = _marks(texts, token_ids_of)
        if marks is None:
            text = "cannot be used: this model's tokenizer has no tokens that end its reasoning"
            raise bad_field(BUDGET_FIELD, text)
        return ReasoningBudget(max_tokens=max_tokens, marks=marks)

    def reasoning_marks(
        self, token_ids_of: Callable[[str], tuple[int, ...] | None], prompt_end: str
    ) -> ReasoningMarks | None:
        """Return the tokens around the reasoning; None if they do not show where it is.

        Args:
            token_ids_of: See `reasoning_budget`.
            prompt_end: Text of the prompt's last tokens.
        """
        texts = None if self.reasoning is None else self.reasoning.texts(prompt_end)
        if texts is None or texts.may_repeat:
            return None
        return _marks(texts, token_ids_of)

    def parser(
        self, special_tokens: Collection[str], prompt_end: str
    ) -> Callable[[], OutputParser]:
        """Return what makes the parser of one choice.

        Args:
            special_tokens: Special tokens that content must not show.
            prompt_end: Text of the prompt's last tokens.
        """
        tools = {tool.name: tool for tool in self.use.tools} if self.tools is not None else {}
        context = OutputContext(tools, prompt_end, tuple(special_tokens))
        max_calls = MAX_CALLS if self.use.is_parallel else 1
        return partial(OutputParser, self.tools, self.reasoning, context, max_calls)


def _marks(
    texts: ReasoningTexts, token_ids_of: Callable[[str], tuple[int, ...] | None]
) -> ReasoningMarks | None:
    start, end = token_ids_of(texts.start), token_ids_of(texts.end)
    if start is None or end is None:
        return None
    return ReasoningMarks(start_token_ids=start, end_token_ids=end, is_open=texts.is_open)


def _checked(text: str, path: str) -> Grammar:
    """Return a grammar; raises BadRequestError if it is too large."""
    # Marks tell calls from text and from each other, and reasoning from what follows.
    grammar = Grammar(StructuredOutputs(grammar=text, is_unambiguous=True), path)
    grammar.check()
    return grammar


def message_output(
    use: ToolUse, card: ModelCard, own_grammar: Grammar | None, *, has_budget: bool = False
) -> MessageOutput | None:
    """Return the formats of a chat's output; None if all of it is content.

    Args:
        use: The request's tools.
        card: The served model.
        own_grammar: The request's own grammar. Its output has no calls, and reasoning only if the
            grammar can begin behind that.
        has_budget: Whether the request limits the reasoning.

    Raises:
        BadRequestError: The model has no format of calls or cannot name a tool in it, a grammar
            cannot be followed together with that of the calls, or reasoning that is to be limited
            is not separated.
    """
    tools = _tool_format(use, card, own_grammar) if use.can_call else None
    reasoning = None
    can_reason = own_grammar is None or can_follow_reasoning(own_grammar.spec)
    if card.reasoning_parser is not None and can_reason:
        reasoning = REASONING_FORMATS[card.reasoning_parser]
    if has_budget and reasoning is None:
        text = "needs a model with args.reasoning_parser"
        if card.reasoning_parser is not None:
            text = "cannot be used with this grammar, which leaves no room for reasoning"
        raise bad_field(BUDGET_FIELD, text)
    if tools is None and reasoning is None:
        return None
    return MessageOutput(tools, reasoning, use)


def _tool_format(use: ToolUse, card: ModelCard, own_grammar: Grammar | None) -> ToolFormat | None:
    """Return the format of the calls; None if the request's own grammar leaves no room for them."""
    if card.tool_call_parser is None:
        text = "cannot be called by this model: its configuration has no args.tool_call_parser"
        raise bad_field("tools", f"{text}; set tool_choice to none, or leave tools out")
    tools = TOOL_FORMATS[card.tool_call_parser]
    for tool in use.tools:
        if not tools.can_call(tool):
            text = "or one of its arguments, has a name that calls of this model cannot have"
            raise bad_field("tools", f"cannot be used: {tool.name}, {text}; rename it")
    if own_grammar is None:
        return tools
    if use.is_constrained:
        text = "cannot be used with tools that are required or strict"
        raise bad_field("response_format", text)
    return None
