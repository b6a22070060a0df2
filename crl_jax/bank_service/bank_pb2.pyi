from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Query(_message.Message):
    __slots__ = ("namespace", "text")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    text: str
    def __init__(self, namespace: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RetrieveRequest(_message.Message):
    __slots__ = ("queries", "peek", "request_id")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    peek: bool
    request_id: str
    def __init__(self, queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., peek: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class Shown(_message.Message):
    __slots__ = ("id", "text", "similarity")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    similarity: float
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., similarity: _Optional[float] = ...) -> None: ...

class ShownList(_message.Message):
    __slots__ = ("shown",)
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    shown: _containers.RepeatedCompositeFieldContainer[Shown]
    def __init__(self, shown: _Optional[_Iterable[_Union[Shown, _Mapping]]] = ...) -> None: ...

class RetrieveReply(_message.Message):
    __slots__ = ("lessons",)
    LESSONS_FIELD_NUMBER: _ClassVar[int]
    lessons: _containers.RepeatedCompositeFieldContainer[ShownList]
    def __init__(self, lessons: _Optional[_Iterable[_Union[ShownList, _Mapping]]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "query", "episode_id", "number", "peek")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: str
    query: str
    episode_id: str
    number: int
    peek: bool
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[str] = ..., query: _Optional[str] = ..., episode_id: _Optional[str] = ..., number: _Optional[int] = ..., peek: _Optional[bool] = ...) -> None: ...

class AskReply(_message.Message):
    __slots__ = ("found", "text", "generation_id", "experience_id")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERIENCE_ID_FIELD_NUMBER: _ClassVar[int]
    found: bool
    text: str
    generation_id: str
    experience_id: str
    def __init__(self, found: _Optional[bool] = ..., text: _Optional[str] = ..., generation_id: _Optional[str] = ..., experience_id: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("env", "seed", "goal", "namespace", "id")
    ENV_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    env: str
    seed: int
    goal: str
    namespace: str
    id: str
    def __init__(self, env: _Optional[str] = ..., seed: _Optional[int] = ..., goal: _Optional[str] = ..., namespace: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("observation", "reply", "span_start", "span_end", "tool", "valid", "logps")
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    SPAN_START_FIELD_NUMBER: _ClassVar[int]
    SPAN_END_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    LOGPS_FIELD_NUMBER: _ClassVar[int]
    observation: str
    reply: str
    span_start: int
    span_end: int
    tool: bool
    valid: bool
    logps: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, observation: _Optional[str] = ..., reply: _Optional[str] = ..., span_start: _Optional[int] = ..., span_end: _Optional[int] = ..., tool: _Optional[bool] = ..., valid: _Optional[bool] = ..., logps: _Optional[_Iterable[float]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("experience_id", "decision", "text")
    EXPERIENCE_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    experience_id: str
    decision: str
    text: str
    def __init__(self, experience_id: _Optional[str] = ..., decision: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("id", "group_id", "condition", "task", "turns", "final_observation", "status", "success", "reward", "shown", "asks", "started_version", "verdicts")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    FINAL_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    STARTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    group_id: str
    condition: str
    task: Task
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    final_observation: str
    status: str
    success: bool
    reward: float
    shown: _containers.RepeatedScalarFieldContainer[str]
    asks: _containers.RepeatedScalarFieldContainer[str]
    started_version: int
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, id: _Optional[str] = ..., group_id: _Optional[str] = ..., condition: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., final_observation: _Optional[str] = ..., status: _Optional[str] = ..., success: _Optional[bool] = ..., reward: _Optional[float] = ..., shown: _Optional[_Iterable[str]] = ..., asks: _Optional[_Iterable[str]] = ..., started_version: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "episodes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    def __init__(self, request_id: _Optional[str] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("request_id", "episodes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    def __init__(self, request_id: _Optional[str] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OnStepRequest(_message.Message):
    __slots__ = ("request_id", "step", "run")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    step: int
    run: str
    def __init__(self, request_id: _Optional[str] = ..., step: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class OnStepReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("pending",)
    PENDING_FIELD_NUMBER: _ClassVar[int]
    pending: int
    def __init__(self, pending: _Optional[int] = ...) -> None: ...

class MergeRequest(_message.Message):
    __slots__ = ("request_id", "namespace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: str
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class MergeReply(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...

class PopBatchRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("generation_id", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    values: _containers.ScalarMap[str, float]
    def __init__(self, generation_id: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PopBatchReply(_message.Message):
    __slots__ = ("full", "samples")
    FULL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    full: bool
    samples: _containers.RepeatedCompositeFieldContainer[Evidence]
    def __init__(self, full: _Optional[bool] = ..., samples: _Optional[_Iterable[_Union[Evidence, _Mapping]]] = ...) -> None: ...

class GenerationsRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("id", "kind", "prompt_ids", "response_ids", "logps", "versions", "step", "parse_error")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARSE_ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    response_ids: _containers.RepeatedScalarFieldContainer[int]
    logps: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    step: int
    parse_error: str
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., response_ids: _Optional[_Iterable[int]] = ..., logps: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., parse_error: _Optional[str] = ...) -> None: ...

class GenerationsReply(_message.Message):
    __slots__ = ("generations",)
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    def __init__(self, generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ...) -> None: ...

class RecordTrainedRequest(_message.Message):
    __slots__ = ("request_id", "generation_ids", "step")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_IDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation_ids: _containers.RepeatedScalarFieldContainer[str]
    step: int
    def __init__(self, request_id: _Optional[str] = ..., generation_ids: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ...) -> None: ...

class RecordTrainedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("saved",)
    SAVED_FIELD_NUMBER: _ClassVar[int]
    saved: str
    def __init__(self, saved: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("request_id", "saved", "rewind", "run")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    saved: str
    rewind: bool
    run: str
    def __init__(self, request_id: _Optional[str] = ..., saved: _Optional[str] = ..., rewind: _Optional[bool] = ..., run: _Optional[str] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("kind", "text", "targets")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "ops")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: str
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[str] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("written", "retired", "duplicates", "evicted", "problems")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    written: _containers.RepeatedScalarFieldContainer[str]
    retired: _containers.RepeatedScalarFieldContainer[str]
    duplicates: int
    evicted: int
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    def __init__(self, written: _Optional[_Iterable[str]] = ..., retired: _Optional[_Iterable[str]] = ..., duplicates: _Optional[int] = ..., evicted: _Optional[int] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ...) -> None: ...

class Experience(_message.Message):
    __slots__ = ("id", "namespace", "text", "generation_id", "op_index", "author_version", "step", "episode_ids", "parents", "outcome")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    OP_INDEX_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPISODE_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace: str
    text: str
    generation_id: str
    op_index: int
    author_version: int
    step: int
    episode_ids: _containers.RepeatedScalarFieldContainer[str]
    parents: _containers.RepeatedScalarFieldContainer[str]
    outcome: bool
    def __init__(self, id: _Optional[str] = ..., namespace: _Optional[str] = ..., text: _Optional[str] = ..., generation_id: _Optional[str] = ..., op_index: _Optional[int] = ..., author_version: _Optional[int] = ..., step: _Optional[int] = ..., episode_ids: _Optional[_Iterable[str]] = ..., parents: _Optional[_Iterable[str]] = ..., outcome: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("shown", "succeeded", "last_shown_step", "recent_shown", "recent_succeeded", "votes")
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    LAST_SHOWN_STEP_FIELD_NUMBER: _ClassVar[int]
    RECENT_SHOWN_FIELD_NUMBER: _ClassVar[int]
    RECENT_SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    shown: int
    succeeded: int
    last_shown_step: int
    recent_shown: float
    recent_succeeded: float
    votes: int
    def __init__(self, shown: _Optional[int] = ..., succeeded: _Optional[int] = ..., last_shown_step: _Optional[int] = ..., recent_shown: _Optional[float] = ..., recent_succeeded: _Optional[float] = ..., votes: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("experience", "usage", "live")
    EXPERIENCE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    experience: Experience
    usage: Usage
    live: bool
    def __init__(self, experience: _Optional[_Union[Experience, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., live: _Optional[bool] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "after", "limit", "newest_first")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after: str
    limit: int
    newest_first: bool
    def __init__(self, namespace: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., newest_first: _Optional[bool] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("entries", "next", "revision")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    next: str
    revision: int
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., next: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...
