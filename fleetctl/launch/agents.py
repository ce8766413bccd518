"""Coding agents that `fleetctl launch` starts: how each one is told its gateway, its key and its model.

An agent gets a folder of its own for settings and sessions, so that the user's stay as they are. The key is in a file of
that folder, never in an argument or in the environment.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from machinery.files import write_atomically

MIN_CONTEXT: Final = 65_536
"""The context that a coding agent needs, in tokens: prompt and tools of Claude Code alone are some 20,000 to 50,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Gateway, key and model for an agent.

    `url` has no path; `context` is in tokens, None if it is not known.
    """

    folder: Path
    """The agent's own folder; it exists."""
    url: str
    key: str
    model: str
    context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Arguments and variables with which an agent is started."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """A coding agent: its program, how it is installed, and how it is set up."""

    title: str
    program: str
    install: str
    write: Callable[[Setup], Command]
    """Writes the agent's settings, and returns how to start it."""


def _write(setup: Setup, name: str, content: str) -> Path:
    path = setup.folder / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, content)
    return path


def _claude(setup: Setup) -> Command:
    """https://code.claude.com/docs/en/settings and /llm-gateway."""
    key = _write(setup, "fleet-key", setup.key)
    settings = {
        "apiKeyHelper": f"cat {shlex.quote(str(key))}",
        "model": setup.model,
        "env": {
            "ANTHROPIC_BASE_URL": setup.url,
            "ANTHROPIC_MODEL": setup.model,
            "ANTHROPIC_SMALL_FAST_MODEL": setup.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": setup.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": setup.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": setup.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Of a model that it does not know, it assumes a million tokens.
            **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(setup.context)} if setup.context else {}),
        },
    }
    _write(setup, "settings.json", json.dumps(settings, indent=2))
    state = setup.folder / ".claude.json"
    if not state.exists():  # else the program asks for a login at Anthropic
        write_atomically(state, json.dumps({"hasCompletedOnboarding": True}))
    return Command(environment={"CLAUDE_CONFIG_DIR": str(setup.folder)})


_CODEX_INSTRUCTIONS: Final = """You are a coding agent in the Codex CLI, which runs on the user's computer.

# Work
- Go on until the user's request is done. Read the files that matter before you change them; never guess what they say.
- Change only what the request needs, in the style of the code around it. Mend causes, not symptoms.
- Follow the AGENTS.md of each folder whose files you change; the deepest one has precedence.
- Check your work: run the tests, or the program. Do not commit, and do not create branches, unless the user asks for it.
- Use `exec_command` for commands; search with `rg`. Ask for more rights only as the permissions below allow it.

# Edits
Edit files with the tool `apply_patch`, whose input is a patch. Paths are relative. A line of a hunk begins with a space
(unchanged), `-` (removed) or `+` (added); give three unchanged lines before and after a change, and a line
`@@ class or function` before the hunk where they are not unique.

*** Begin Patch
*** Update File: src/hello.py
@@ def greet():
-    print("Hi")
+    print("Hello")
*** Add File: notes.txt
+A line of a new file.
*** Delete File: old.txt
*** End Patch

# Answers
Answer briefly, in Markdown: what you did, which files you changed, and what you could not check.
"""


def _codex(setup: Setup) -> Command:
    """https://developers.openai.com/codex/config-reference.

    Codex CLI offers `apply_patch` only to models of a catalog, which must have the instructions of each.
    """
    entry = {
        "slug": setup.model,
        "display_name": setup.model,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        **({"context_window": setup.context} if setup.context else {}),
    }
    catalog = _write(setup, "models.json", json.dumps({"models": [entry]}, indent=2))
    lines = [
        f"model = {json.dumps(setup.model)}",
        'model_provider = "fleet"',
        f"model_catalog_json = {json.dumps(str(catalog))}",
        "check_for_update_on_startup = false",
        "[analytics]",
        "enabled = false",
        "[model_providers.fleet]",
        'name = "mlx-fleet"',
        f"base_url = {json.dumps(setup.url + '/v1')}",
        'wire_api = "responses"',
        f"experimental_bearer_token = {json.dumps(setup.key)}",
    ]
    _write(setup, "config.toml", "\n".join(lines) + "\n")
    return Command(environment={"CODEX_HOME": str(setup.folder)})


def _opencode(setup: Setup) -> Command:
    """https://opencode.ai/docs/providers/#custom-provider and /config."""
    key = _write(setup, "fleet-key", setup.key)
    limit = {"limit": {"context": setup.context, "output": 8192}} if setup.context else {}
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"fleet/{setup.model}",
        "small_model": f"fleet/{setup.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "fleet": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlx-fleet",
                "options": {"baseURL": f"{setup.url}/v1", "apiKey": f"{{file:{key}}}"},
                "models": {setup.model: {"name": setup.model, **limit}},
            }
        },
    }
    config = _write(setup, "opencode.json", json.dumps(settings, indent=2))
    return Command(
        environment={
            "OPENCODE_CONFIG": str(config),
            **{
                f"XDG_{kind.upper()}_HOME": str(setup.folder / kind)
                for kind in ("config", "data", "state", "cache")
            },
        }
    )


def _qwen(setup: Setup) -> Command:
    """https://qwenlm.github.io/qwen-code-docs/en/users/configuration/settings."""
    settings = {
        "security": {
            "auth": {
                "selectedType": "openai",
                "apiKey": setup.key,
                "baseUrl": f"{setup.url}/v1",
            }
        },
        "model": {"name": setup.model},
        "general": {"disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
    }
    _write(setup, "settings.json", json.dumps(settings, indent=2))
    # It sends every request to a proxy, also those to hosts of NO_PROXY.
    proxies = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
    return Command(environment={"QWEN_HOME": str(setup.folder), **dict.fromkeys(proxies, "")})


def _aider(setup: Setup) -> Command:
    """https://aider.chat/docs/config/aider_conf.html."""
    name = f"openai/{setup.model}"
    settings = {
        "model": name,
        "openai-api-base": f"{setup.url}/v1",
        "openai-api-key": setup.key,
        "analytics-disable": True,
        "check-update": False,
        "show-model-warnings": False,
    }
    config = _write(setup, "aider.conf.yml", json.dumps(settings))  # JSON is YAML
    limits = {name: {"max_input_tokens": setup.context}} if setup.context else {}
    metadata = _write(setup, "models.json", json.dumps(limits))
    return Command(arguments=("--config", str(config), "--model-metadata-file", str(metadata)))


AGENTS: Final = {
    "claude": CodingAgent(
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        write=_claude,
    ),
    "codex": CodingAgent(
        title="Codex CLI", program="codex", install="npm install -g @openai/codex", write=_codex
    ),
    "opencode": CodingAgent(
        title="opencode", program="opencode", install="npm install -g opencode-ai", write=_opencode
    ),
    "qwen": CodingAgent(
        title="Qwen Code",
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        write=_qwen,
    ),
    "aider": CodingAgent(
        title="aider", program="aider", install="uv tool install aider-chat", write=_aider
    ),
}
