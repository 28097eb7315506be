"""How the OpenAPI document describes what the HTTP door takes and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from appliance.adapters.answers import Json
from models.spec import DTYPES

MEANINGS = {
    400: "the request cannot be used",
    401: "a token or certificate is needed",
    403: "this caller may not do this",
    404: "there is no such model or version",
    413: "over a limit of size",
    415: "compressed bodies are not taken",
    429: "too many requests, retry later",
    500: "the model, or the appliance, failed",
    503: "not ready, retry later",
    504: "the deadline passed",
    507: "the memory budget would not hold it",
}
"""Statuses of errors as the OpenAPI document explains them."""

JSON: dict[str, Any] = {"application/json": {"schema": {}}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PICTURE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
            "image/png": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"image": {"type": "string", "format": "binary"}}}
            },
        },
    }
}

_PARAMETERS = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
INDEX_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
ORDER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"parameters": {"type": "object", "properties": {"unload_dependents": {"type": "boolean"}}}},
}
FAULT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["fault"],
    "properties": {
        "fault": {"type": "string"},
        "model": {"type": "string"},
        "amount": {"type": "number"},
        "for_s": {"type": "number"},
    },
}
COMMAND_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "command"],
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 128},
        "command": {"type": "string"},
        "args": {"type": "object"},
        "device_id": {"type": "string"},
        "expires_at": {"type": "number"},
    },
}
INFER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "datatype", "shape"],
                "properties": {
                    "name": {"type": "string"},
                    "datatype": {"type": "string", "enum": [*DTYPES, "BYTES"]},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "data": {"type": "array", "items": {}},
                    "parameters": _PARAMETERS,
                },
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
            },
        },
    },
}
"""Bodies as the OpenAPI document describes them."""


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
"""By reference, as a model of each would make the start several times as long."""


class App(FastAPI):
    """The application with a document that says what it really answers."""

    def openapi(self) -> dict[str, Any]:
        """The document without 422, which FastAPI adds and this door never answers."""
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        return document


def answers(*statuses: int, content: Mapping[str, Any] = JSON) -> dict[str, Any]:
    """What a route may answer: `content` after success, and errors of `statuses` besides those of every route."""
    return {
        "response_class": Json if content is not TEXT else PlainTextResponse,
        "responses": {
            200: {"description": "done", "content": content},
            **{code: {"description": MEANINGS[code], "content": _ERROR} for code in (400, 401, 403, 429, *statuses)},
        },
    }


def json_body(schema: dict[str, Any], *, required: bool = False, **more: dict[str, Any]) -> dict[str, Any]:
    """What a route takes as its body."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}, **more}}}
