"""What a format of tool calls or reasoning has to define, and how both read one output.

Source of the formats: the chat templates of the model families, and vLLM 0.32's parsers of the same
names (vllm/tool_parsers, vllm/reasoning).
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.edge.families.errors import MalformedCallError, TruncatedCallError
from cluster.edge.families.message import new_call_id
from cluster.edge.families.reader import Markers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.edge.families.lark import Lark
    from cluster.edge.families.message import MessageSink, Tool
    from cluster.edge.families.reader import Steps, TextReader


MAX_REFUSED_CHARS = 2**18
"""Characters of texts that look like calls but are none, after which a message has no more calls.
Such a text is read again, and may be as long as the rest of the output."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of `reasoning_effort` in OpenAI's API and vLLM's, in their order."""

_markers = functools.lru_cache(maxsize=256)(Markers)
"""Markers by their texts, which follow from a model's formats and special tokens."""


@dataclass(frozen=True, slots=True)
class OutputContext:
    """What a parser knows about the request.

    Attributes:
        tools: The offered tools by name; empty if calls must not be read.
        prompt_end: The last characters of the prompt, with its special tokens.
        hidden: Texts of special tokens that are left out of the message.
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    prompt_end: str = ""
    hidden: Sequence[str] = ()

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; empty for an unknown tool."""
        tool = self.tools.get(name)
        return {} if tool is None else tool.parameters


class ToolFormat(abc.ABC):
    """Format of the tool calls of a model family.

    Attributes:
        starts: Texts with which a call, or a section of calls, begins.
        start: The one with which a constrained call begins; None is the first of `starts`.
        leading: The same, only where no text precedes them.
        separator: Text between two calls that are not in one section.
        is_section: Whether several calls stand behind one start.
        keeps_space: See `MessageSink`.
        passes_cut: Whether a call that a limit of the output cuts is passed on as content.
    """

    starts: tuple[str, ...] = ()
    start: str | None = None
    leading: tuple[str, ...] = ()
    separator: str = ""
    is_section: bool = False
    keeps_space: bool = False
    passes_cut: bool = False

    @abc.abstractmethod
    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read the calls behind `start`, which has been read, and give them to the sink.

        Raises:
            MalformedCallError: The text is no call.
            TruncatedCallError: The text ends within a call.
        """

    @abc.abstractmethod
    def calls_expression(self, lark: Lark, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return an expression for what follows a start: a call of one of the tools.

        In a section several calls, if `is_parallel`. Text that matches it is what `read_calls`
        reads.
        """

    def can_call(self, tool: Tool) -> bool:
        """Return whether the format can write calls of a tool."""
        del tool
        return True

    def new_call_id(self) -> str:
        """Return the id of a call to which the model gives none."""
        return new_call_id()

    def rendered_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message of the history as the family's chat template takes it.

        Args:
            message: Its `tool_calls` have arguments as objects.
        """
        return message


class WholeFormat(ToolFormat):
    """Format of a whole message, with calls and reasoning as parts of one structure."""

    @abc.abstractmethod
    def read(self, reader: TextReader, sink: MessageSink, context: OutputContext) -> Steps[None]:
        """Read the message.

        Raises:
            TruncatedCallError: The text is cut within a part, of which nothing is given.
        """

    def shortened(self, prompt_end: str) -> str:
        """Return a text that means the same at the end of a prompt."""
        del prompt_end
        return ""

    @abc.abstractmethod
    def reasoning_texts(self, prompt_end: str) -> ReasoningTexts | None:
        """Return the texts around the reasoning; None if the output has none."""

    @abc.abstractmethod
    def message(self, lark: Lark, calls: str, prompt_end: str, *, is_required: bool) -> str:
        """Return an expression for a message whose calls match `calls`."""

    @abc.abstractmethod
    def answer(self, lark: Lark, content: str, prompt_end: str) -> str:
        """Return an expression for reasoning, which may be missing, and content without calls."""

    def read_calls(
        self, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
    ) -> Steps[None]:
        """Read nothing: calls are parts of the message."""
        del start, reader, sink, context
        yield from ()


class ReasoningTexts(NamedTuple):
    """The texts around the reasoning in an output.

    Attributes:
        start: Text that begins it.
        end: Text that ends it.
        is_open: Whether the prompt has begun it.
        may_repeat: Whether it may begin anywhere and again.
    """

    start: str
    end: str
    is_open: bool
    may_repeat: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two texts, before the message's content.

    Attributes:
        start: Text that begins it, in the output or at the end of the prompt.
        end: Text that ends it.
        is_default: Whether output begins with it if neither text is at the end of the prompt.
        calls_end_it: Whether a call in it ends it, too.
        alternative: Further pair of texts.
        whole: Format of the whole message, if reasoning is a part of one structure.
        efforts: Levels that the family's template knows, of `EFFORTS`; empty: it may know any.
    """

    start: str
    end: str
    is_default: bool = False
    calls_end_it: bool = False
    alternative: tuple[str, str] | None = None
    whole: WholeFormat | None = None
    efforts: tuple[str, ...] = ()

    def known_effort(self, effort: str) -> str:
        """Return the level of the family that is nearest to one of `EFFORTS`."""
        place = EFFORTS.index(effort)
        return min(self.efforts or EFFORTS, key=lambda each: abs(EFFORTS.index(each) - place))

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the texts that begin it in the output."""
        return (self.start,) if self.alternative is None else (self.start, self.alternative[0])

    def opened_by(self, prompt_end: str) -> bool | None:
        """Return whether the prompt has begun it; None if the output may begin it."""
        begin, end = prompt_end.rfind(self.start.strip()), prompt_end.rfind(self.end)
        behind = prompt_end[begin + len(self.start.strip()) :]
        if begin > end and (not behind.strip()):
            return True
        if end > begin and not prompt_end[end + len(self.end) :].strip():
            return False
        return True if self.is_default else None

    def texts(self, prompt_end: str) -> ReasoningTexts | None:
        """Return the texts around the reasoning; None if the output has none."""
        if self.whole is not None:
            return self.whole.reasoning_texts(prompt_end)
        is_open = self.opened_by(prompt_end)
        if is_open is False:
            return None
        return ReasoningTexts(self.start.strip(), self.end, is_open is True)

    def shortened(self, prompt_end: str) -> str:
        """Return a text that means the same at the end of a prompt."""
        is_open = self.opened_by(prompt_end)
        if is_open is None:
            return ""
        return self.start if is_open else self.start + self.end


def read_message(
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    reader: TextReader,
    sink: MessageSink,
    context: OutputContext,
) -> Steps[None]:
    """Read a message: reasoning, if there is any, then content with calls."""
    whole = whole_format(tools, reasoning)
    if whole is not None:
        try:
            yield from whole.read(reader, sink, context)
        except TruncatedCallError:
            sink.abandon_call(is_cut=True)
        return
    if not context.tools:
        tools = None
    hidden = context.hidden
    if reasoning is not None:
        end = yield from _reasoning_end(reasoning, reader, context.prompt_end)
        if end is not None:
            has_more = yield from _read_reasoning(reasoning, end, tools, reader, sink, context)
            if not has_more:
                return
            hidden = (*hidden, end) if reasoning.calls_end_it else hidden
    starts = () if tools is None else tools.starts
    markers = _markers((*starts, *(text for text in hidden if text not in starts)))
    if tools is not None:
        yield from _read_leading(tools, reader, sink, context)
    while (start := (yield from reader.copy_until(markers, sink.content))) is not None:
        if tools is not None and start in starts:
            yield from try_calls(tools, start, reader, sink, context)


def whole_format(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> WholeFormat | None:
    """Return the format of the whole message, if the calls or the reasoning have one."""
    if isinstance(tools, WholeFormat):
        return tools
    return None if reasoning is None else reasoning.whole


def _read_leading(
    tools: ToolFormat, reader: TextReader, sink: MessageSink, context: OutputContext
) -> Steps[None]:
    """Read calls that stand only at the beginning of the content."""
    begin = reader.pos
    if tools.leading:
        yield from reader.skip_space()
    start = yield from reader.starts_any(tools.leading)
    if start is None:
        reader.pos = begin
    else:
        yield from try_calls(tools, start, reader, sink, context)


def _reasoning_end(
    reasoning: ReasoningFormat, reader: TextReader, prompt_end: str
) -> Steps[str | None]:
    """Return the text that ends the reasoning with which the output begins; None without one."""
    is_open = reasoning.opened_by(prompt_end)
    if is_open is False:
        return None
    begin = reader.pos
    pairs = [(reasoning.start, reasoning.end)]
    if reasoning.alternative is not None and not is_open:
        pairs.append(reasoning.alternative)
    yield from reader.skip_space()
    for start, end in pairs:
        if (yield from reader.starts(start)):
            return end
    reader.pos = begin
    return reasoning.end if is_open else None


def _read_reasoning(
    reasoning: ReasoningFormat,
    end: str,
    tools: ToolFormat | None,
    reader: TextReader,
    sink: MessageSink,
    context: OutputContext,
) -> Steps[bool]:
    """Read reasoning up to its end or a call; return whether text may follow."""
    starts = tools.starts if tools is not None and reasoning.calls_end_it else ()
    hidden = (text for text in context.hidden if text != end and text not in starts)
    markers = _markers((end, *starts, *hidden))
    while (found := (yield from reader.copy_until(markers, sink.reasoning))) is not None:
        if found == end:
            sink.end_reasoning()
            return True
        if found in starts and reader.num_refused_chars >= MAX_REFUSED_CHARS:
            sink.reasoning(found)
            continue
        if tools is not None and found in starts:
            num_calls = sink.num_calls
            begin = reader.call_begin = reader.pos
            try:
                yield from tools.read_calls(found, reader, sink, context)
            except (MalformedCallError, TruncatedCallError) as error:
                is_cut = isinstance(error, TruncatedCallError) and reader.is_cut
                sink.abandon_call(is_cut=is_cut)
                if is_cut:
                    return False
                if sink.num_calls == num_calls:
                    sink.reasoning(found)
                    reader.reread(begin, error)
                    continue
                reader.reread(reader.call_begin, error)
            sink.end_reasoning()
            return True
    return False


def try_calls(
    tools: ToolFormat, start: str, reader: TextReader, sink: MessageSink, context: OutputContext
) -> Steps[None]:
    """Read calls; text that is none becomes content, and all after `MAX_REFUSED_CHARS`.

    All of a malformed call becomes content, also if its beginning was given as a call before.
    """
    if reader.num_refused_chars >= MAX_REFUSED_CHARS:
        sink.content(start)
        return
    num_calls = sink.num_calls
    begin = reader.call_begin = reader.pos
    try:
        yield from tools.read_calls(start, reader, sink, context)
    except (MalformedCallError, TruncatedCallError) as error:
        is_cut = isinstance(error, TruncatedCallError) and reader.is_cut
        is_open = sink.abandon_call(is_cut=is_cut)
        if is_cut and (is_open or not tools.passes_cut):
            reader.pos = len(reader.text)
        elif sink.num_calls == num_calls:
            sink.content(start)
            reader.reread(begin, error)
        else:
            reader.reread(reader.call_begin, error)
