"""One frozen settings model. Flags beat environment, environment beats the YAML file, that beats defaults.

A field ``max_batch_tokens`` is the flag ``--max-batch-tokens``, the variable ``PYRUNTIME_MAX_BATCH_TOKENS``
and the YAML key ``max_batch_tokens``; the flag of ``models`` is ``--model NAME=PATH``, repeatable. A bad
value ends the program with exit code 2 and a message naming the option, its source and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from pyruntime.config_options import ENV_PREFIX, Options, flag
from pyruntime.config_values import Address, Bytes, Host, InnerHost, Memory, Models, TaskShares
from pyruntime.types import Task


class Settings(BaseModel):
    """What the server runs with. Sizes in bytes, times in seconds; 0 threads means every core."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Models = Field({}, description="a model to serve: a name and a folder, hub name or .gguf file")
    demo: bool = Field(False, description="serve the two demo models as well")
    host: Host = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all; or unix:PATH")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of metrics and status page; unset: none, 0: a free one"
    )
    metrics_host: InnerHost = Field("127.0.0.1", description="address of that port; it asks for no credentials")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of weights; auto: the model's own")
    quantization: Literal["none", "int8"] = Field(
        "none", description="of linear layers, on a CPU; int8: sooner, less exact"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:INDEX")
    cuda_graphs: Literal["on", "off"] = Field("on", description="on a GPU, decode steps launched as a whole")
    threads: int = Field(0, ge=0, le=4096, description="compute threads, within the cores that may be used; 0: all")
    deterministic: bool = Field(False, description="same bits whatever shares the batch; slower on long prompts")
    max_batch_tokens: int = Field(2048, ge=1, le=2**20, description="most tokens in one forward step")
    max_prompt_tokens_beside: int = Field(256, ge=1, le=2**20, description="of them for prompts while streams run")
    max_pause_factor: float = Field(
        3.0, ge=0, le=1000, description="longest step beside streams, in usual ones; 0: any"
    )
    max_running_sequences: int = Field(256, ge=1, le=2**16, description="most sequences in the batch at once")
    max_queue_requests: int = Field(1024, ge=1, le=2**20, description="waiting requests past which one is refused")
    max_queue_tokens: int = Field(
        2**20, ge=1, le=2**32, description="tokens of waiting requests past which one is refused"
    )
    max_queue_time_s: float = Field(
        30.0, ge=0, le=86400, description="seconds of queue past which a request without a deadline is refused; 0: none"
    )
    priority_ageing_s: float = Field(
        30.0, ge=0, le=86400, description="seconds of waiting worth a priority class; 0: none"
    )
    task_shares: TaskShares = Field(dict.fromkeys(Task, 1.0), description="weights of the tasks when all have work")
    stream_buffer_tokens: int = Field(
        256, ge=1, le=2**20, description="tokens unread by a client past which its stream waits"
    )
    kv_cache_bytes: Memory = Field(
        2**30, description="key/value cache of each decoder; in %: of the memory that weights leave, for all together"
    )
    speculation: Literal["auto", "off"] = Field(
        "auto", description="guess tokens ahead from the text so far; auto: where that has paid; answers are the same"
    )
    max_draft_tokens: int = Field(8, ge=1, le=64, description="most tokens guessed ahead of a stream in a step")
    max_draft_rows: int = Field(
        48, ge=2, le=1024, description="most streams and guesses in a step; none with more streams"
    )
    prefix_cache: bool = Field(True, description="keep the keys and values of earlier prompts for later ones")
    kv_block_size: int = Field(16, ge=1, le=1024, description="tokens in one cache block")
    socket_access: Literal["owner", "group", "all"] = Field("owner", description="who may open the socket of unix:PATH")
    insecure: bool = Field(False, description="serve other machines without TLS, as where a mesh encrypts")
    tls_certificate: str = Field("", description="PEM certificate chain, read again when it changes")
    tls_key: str = Field("", description="PEM private key of the certificate, without a passphrase")
    tls_client_ca: str = Field("", description="PEM authorities; only clients with a certificate of theirs get in")
    token_file: str = Field("", description="bearer tokens, one a line, of which calls need one")
    admin_token_file: str = Field("", description="the same for AdminService")
    health: Literal["open", "token"] = Field("open", description="whether health checks need a token too")
    reflection: Literal["open", "token", "off"] = Field("token", description="whether reflection needs a token too")
    max_open_calls: int = Field(4096, ge=1, le=2**20, description="calls at once past which one is refused")
    max_streams_per_connection: int = Field(1024, ge=1, le=2**20, description="calls at once of one connection")
    keepalive_s: float = Field(
        60.0, ge=0, le=86400, description="seconds of silence after which a client is pinged; 0: never"
    )
    keepalive_timeout_s: float = Field(20.0, ge=1, le=3600, description="seconds that a pinged client has to answer")
    max_connection_idle_s: float = Field(
        1800.0, ge=0, le=10**6, description="seconds without a call that end a connection; 0: none do"
    )
    max_connection_age_s: float = Field(0.0, ge=0, le=10**6, description="seconds after which it ends anyway; 0: never")
    max_connection_grace_s: float = Field(300.0, ge=1, le=10**6, description="seconds its calls then have to end")
    client_stall_s: float = Field(
        60.0, ge=0, le=86400, description="seconds that a stream waits for its client to read; 0: for ever"
    )
    step_stall_s: float = Field(
        120.0, ge=0, le=86400, description="seconds in one step past which a model is not healthy; 0: any"
    )
    compress_responses: bool = Field(False, description="gzip answers for clients that take it")
    max_message_bytes: Bytes = Field(64 * 2**20, ge=2**10, le=2**31 - 1, description="largest gRPC message")
    max_inputs_per_request: int = Field(2048, ge=1, le=2**20, description="most inputs, items or documents a request")
    max_labels_per_request: int = Field(4096, ge=1, le=2**20, description="most labels of a Score request")
    max_scores_per_request: int = Field(2**20, ge=1, le=2**28, description="most items x labels of a Score request")
    max_text_bytes: Bytes = Field(2**20, ge=1, le=2**31 - 1, description="longest single text, in UTF-8 bytes")
    max_request_text_bytes: Bytes = Field(8 * 2**20, ge=1, le=2**31 - 1, description="all texts of a request together")
    drain_grace_s: float = Field(30.0, ge=0, le=3600, description="seconds that running requests get at shutdown")
    admin_address: Address = Field("", description="listener of AdminService alone")
    self_check: bool = Field(True, description="compare each model with its eager reference before serving it")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people, or one JSON object each")
    access_log: bool = Field(True, description="a log line for each call")
    log_texts: bool = Field(False, description="show users' texts in the log: requests, messages of errors")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^\s/]+/?)?$",
        description="OpenTelemetry collector that takes traces by OTLP over gRPC",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        """YAML's ``port: yes`` is a mistake, which pydantic would read as the number 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are not allowed here")
        return value

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """Settings from command-line arguments (without the program's name), environment and YAML file.

        Prints a message and raises ``SystemExit(2)`` on an unknown option or key, or a bad value.
        """
        parser = OPTIONS.parser()
        flags = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
        config = flags.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
        values, sources = dict[str, Any](), dict[str, str]()
        for source, found in (
            (f"the file {config}", OPTIONS.read_yaml(parser, config) if config else {}),
            ("the environment", OPTIONS.from_environment(environ)),
            ("the command line", flags),
        ):
            values |= found
            sources |= dict.fromkeys(found, source)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            parser.error("\n  ".join(OPTIONS.explain(problem, values, sources) for problem in error.errors()))

    def idle(self) -> list[str]:
        """Of the options that were given, those that do nothing beside the others, each with what it needs."""
        has_unix, has_tokens = self.host.startswith("unix:"), bool(self.token_file or self.admin_token_file)
        has_tcp = not has_unix or (self.admin_address and not self.admin_address.startswith("unix:"))
        needs: dict[str, tuple[object, str]] = {
            "metrics_host": (self.metrics_port is not None, "--metrics-port"),
            "admin_token_file": (self.admin_address, "--admin-address"),
            "socket_access": (has_unix, "--host unix:PATH"),
            "tls_certificate": (has_tcp, "a listener that is no Unix socket"),
            "health": (has_tokens or self.health == "open", "--token-file"),
            "keepalive_timeout_s": (self.keepalive_s, "--keepalive-s above 0"),
            "max_connection_grace_s": (self.max_connection_age_s, "--max-connection-age-s"),
            "cuda_graphs": (self.device != "cpu", "--device cuda"),
            "max_draft_tokens": (self.speculation != "off", "--speculation auto"),
            "max_draft_rows": (self.speculation != "off", "--speculation auto"),
        }
        given = [(name, need) for name, (works, need) in needs.items() if name in self.model_fields_set and not works]
        return [f"{flag(name)} does nothing without {need}" for name, need in given]


OPTIONS = Options(Settings.model_fields)
