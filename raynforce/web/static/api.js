// Questions to the server, each with the token, and its stream of changes.
const KEY = "raynforce.token";
const listeners = new Set();
let state = "connecting";

function takeToken() {
  const found = /(?:^#|[#&?])token=([\w-]+)/.exec(location.hash);
  if (!found) return;
  try { localStorage.setItem(KEY, found[1]); } catch { kept = found[1]; }
  kept = found[1];
  const rest = location.hash.replace(/[#&?]?token=[\w-]+/, "");
  history.replaceState(null, "", rest.startsWith("#/") || rest === "" ? rest || "#/" : `#${rest}`);
}

let kept = "";
export function token() {
  takeToken();
  if (kept) return kept;
  try { return localStorage.getItem(KEY) || ""; } catch { return ""; }
}

export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

const headers = (more) => ({ Authorization: `Bearer ${token()}`, ...more });

async function answered(response) {
  if (response.ok) return response;
  let text = response.statusText;
  try { text = (await response.json()).error; } catch { /* no JSON */ }
  if (response.status === 401) become("refused");
  throw new Refused(response.status, text);
}

export async function get(path, signal) {
  return (await answered(await fetch(path, { headers: headers(), signal, cache: "no-store" }))).json();
}

export async function blob(path) {
  return (await answered(await fetch(path, { headers: headers() }))).blob();
}

export async function post(path, data) {
  const how = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(data) };
  return (await answered(await fetch(path, how))).json();
}

const tags = new Map();
export async function getIfNew(path) {
  const known = tags.get(path);
  const response = await fetch(path, { headers: headers(known ? { "If-None-Match": known.tag } : {}), cache: "no-store" });
  if (response.status === 304) return known.data;
  const data = await (await answered(response)).json();
  tags.set(path, { tag: response.headers.get("etag"), data });
  return data;
}

export const connection = () => state;
export function onChange(listener) { listeners.add(listener); return () => listeners.delete(listener); }

function become(next, news = {}) {
  const before = state;
  state = next;
  if (before !== next || news.changed) for (const listener of [...listeners]) listener({ state, ...news });
}

export async function follow() {
  for (;;) {
    try {
      const response = await answered(await fetch("/api/changes", { headers: headers(), cache: "no-store" }));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        for (const part of parts) {
          const line = part.split("\n").find((each) => each.startsWith("data: "));
          if (!line) continue;
          const news = JSON.parse(line.slice(6));
          if (news.hello) become("live");
          else become("live", news);
        }
      }
      become("lost");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        become("refused");
        await new Promise((done) => setTimeout(done, 1500));
      } else become("lost");
    }
    await new Promise((done) => setTimeout(done, 500));
  }
}
