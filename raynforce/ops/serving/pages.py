"""What describes the endpoint: an OpenAPI document, and a page that needs nothing from elsewhere."""

from __future__ import annotations

import json
from typing import Any


def _answer(what: str, media: str = "application/json") -> dict[str, Any]:
    return {"description": what, "content": {media: {}}}


def _errors(*codes: int) -> dict[str, Any]:
    known = {
        401: "The token is missing or wrong.",
        408: "The body did not arrive in time.",
        409: "Refused; what is served stays.",
        413: "The body is too large.",
        415: "The body is neither JSON nor npy.",
        421: "The Host header names another server.",
        422: "The observation does not fit, in one line.",
        429: "Too many requests.",
    }
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        str(code): {"description": known[code], "content": {"application/json": {"schema": schema}}} for code in codes
    }


def _document() -> dict[str, Any]:
    from raynforce import __version__

    asked = {
        "type": "object",
        "required": ["obs"],
        "additionalProperties": False,
        "properties": {
            "obs": {"description": "One observation, or a batch: an array, or an object by the keys of a Dict space."},
            "greedy": {"type": "boolean", "description": "The best action, or one sampled as in training."},
            "mask": {"type": "array", "description": "Choices of a discrete space that are allowed."},
        },
    }
    answer = {
        "type": "object",
        "required": ["action", "version", "policy"],
        "properties": {
            "action": {"description": "An action, or one for each observation of the batch."},
            "version": {"type": "integer", "description": "Of the policy that chose it."},
            "policy": {"enum": ["main", "canary"]},
        },
    }
    taken = _answer("What is served now.")
    paths: dict[str, Any] = {
        "/act": {
            "post": {
                "summary": "Choose actions.",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": asked, "example": {"obs": [0.0, 0.1, 0.0, -0.1]}},
                        "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
                    },
                },
                "responses": {
                    "200": {
                        "description": "The action; an npy array to an npy array.",
                        "content": {"application/json": {"schema": answer}, "application/x-npy": {}},
                    },
                    **_errors(401, 408, 413, 415, 421, 422, 429),
                },
            }
        },
        "/info": {
            "get": {"summary": "Spaces, policies, limits.", "responses": {"200": _answer("Facts."), **_errors(401)}}
        },
        "/metrics": {
            "get": {"summary": "For Prometheus.", "responses": {"200": _answer("Text.", "text/plain"), **_errors(401)}}
        },
        "/reload": {
            "post": {"summary": "Take the newest checkpoint.", "responses": {"200": taken, **_errors(401, 409)}}
        },
        "/rollback": {
            "post": {
                "summary": "Go back to the policy before.",
                "requestBody": {"content": {"application/json": {"example": {"policy": "main"}}}},
                "responses": {"200": taken, **_errors(401, 409)},
            }
        },
        "/health": {"get": {"summary": "Whether it is up.", "security": [], "responses": {"200": _answer("It is.")}}},
    }
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "A policy of Raynforce", "version": __version__},
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": error},
        },
        "paths": paths,
    }


OPENAPI = json.dumps(_document()).encode()
PAGE = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>A policy of Raynforce</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { font-size: 1rem; margin: 2rem 0 .3rem } code, pre, textarea, input { font: 14px ui-monospace, monospace }
input, textarea { width: 100%; box-sizing: border-box; padding: .4rem } textarea { height: 5rem }
pre { background: #f4f4f4; padding: .7rem; overflow: auto; white-space: pre-wrap } li { margin: .1rem 0 }
@media (prefers-color-scheme: dark) {
  body, input, textarea { background: #181818; color: #ddd } pre { background: #222 } }
</style>
<h1>A policy of Raynforce</h1>
<p>Described by <a href="/openapi.json">/openapi.json</a>.</p>
<label>Token <input id="token" type="password" autocomplete="off"></label>
<div id="paths"></div>
<script>
const make = (tag, text, parent) => {
  const node = document.createElement(tag); node.textContent = text; parent.append(node); return node }
const show = (document_) => { for (const [path, methods] of Object.entries(document_.paths))
  for (const [method, about] of Object.entries(methods)) {
    const box = make("section", "", document.getElementById("paths"))
    make("h2", method.toUpperCase() + " " + path, box); make("div", about.summary, box)
    const example = about.requestBody?.content["application/json"]?.example
    const body = example && make("textarea", JSON.stringify(example), box)
    const button = make("button", "Try", box), out = make("pre", "", box); out.hidden = true
    const list = make("ul", "", box)
    for (const [code, answer] of Object.entries(about.responses)) make("li", code + ": " + answer.description, list)
    button.onclick = async () => {
      const headers = { authorization: "Bearer " + document.getElementById("token").value }
      if (body) headers["content-type"] = "application/json"
      const answer = await fetch(path, { method: method.toUpperCase(), headers, body: body?.value })
      out.hidden = false; out.textContent = answer.status + "\\n" + await answer.text() } } }
fetch("/openapi.json").then(answer => answer.json()).then(show)
</script>
</html>
"""
