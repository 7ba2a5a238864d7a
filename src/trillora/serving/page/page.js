// The chat page. It uses only GET /v1/models, POST /v1/chat/completions and GET /report of its own server.
"use strict";

const $ = (id) => document.getElementById(id);
const NONE = ""; // choice of the right column: only one model answers
const needsKey = document.body.dataset.needsKey === "true";
const policy = window.trustedTypes?.createPolicy("report", { createHTML: (html) => html });

let key = ""; // never stored
let rounds = []; // {question, answers: [{model, text}]}; one answer for each column
let running = null; // the AbortController of the answers that are streaming

// Control and text-direction characters as escapes: they could hide or reorder what a model wrote.
function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g,
    (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"),
  );
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = visible(text);
  return made;
}

// Requests

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Check that it is still running.", 0);
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new Refused(found?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

// The JSON events of a stream. A stream that ends without [DONE] was cut off.
async function* eventsOf(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The connection was closed before the end of the answer.", 0);
    const lines = (rest + decoder.decode(value, { stream: true })).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // an empty line or a keep-alive
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message ?? "The server reported an error.", 0);
      yield event;
    }
  }
}

// Conversation

const modelsChosen = () => [...document.querySelectorAll("select.model")].map((s) => s.value).filter((id) => id !== NONE);

// What the model of a column has seen: the system message, and each question that it answered.
function conversation(column) {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answers } of rounds) {
    const answer = answers[column];
    if (!answer?.text.trim()) continue; // failed or stopped before its first word
    messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
  }
  return messages;
}

async function send() {
  const question = $("message").value.trim();
  const models = modelsChosen();
  if (running || !question || !models.length) return;
  if (!$("ask").checkValidity()) $("settings").open = true;
  if (!$("ask").reportValidity()) return;
  const settings = {
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    seed: Number($("seed").value),
  };
  const before = models.map((_, column) => conversation(column));
  const round = { question, answers: models.map((model) => ({ model, text: "" })) };
  const views = showRound(round);
  rounds.push(round);
  $("message").value = "";
  running = new AbortController();
  showState();
  const messages = (column) => [...before[column], { role: "user", content: question }];
  await Promise.all(
    round.answers.map((answer, column) => streamAnswer(answer, views[column], messages(column), settings, running.signal)),
  );
  running = null;
  showState();
  $("message").focus();
}

async function streamAnswer(answer, view, messages, settings, signal) {
  const started = performance.now();
  let tokens = null;
  let reason = "";
  try {
    const body = { model: answer.model, messages, ...settings, stream: true, stream_options: { include_usage: true } };
    const response = await request("v1/chat/completions", { body, signal });
    for await (const event of eventsOf(response)) {
      const [choice] = event.choices ?? [];
      tokens = event.usage?.completion_tokens ?? tokens;
      if (choice?.finish_reason === "length") reason = "max tokens reached";
      if (choice?.delta?.content) {
        answer.text += choice.delta.content;
        view.text.firstChild.appendData(visible(choice.delta.content));
        showEnd();
      }
    }
  } catch (error) {
    reason = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) view.box.append(element("div", "error", error.message));
    if (error.status === 401) askForKey("The key is not accepted any more.");
  }
  const seconds = (performance.now() - started) / 1000;
  const count = tokens === null ? "" : `${tokens} token${tokens === 1 ? "" : "s"}`;
  view.figures.textContent = [reason, count, `${seconds.toFixed(1)} s`].filter(Boolean).join(" · ");
  view.copy.hidden = !answer.text;
  view.box.classList.remove("waiting");
  showEnd();
}

function showRound(round) {
  $("hint").hidden = true;
  const answers = element("div", "answers");
  const views = round.answers.map((answer) => {
    const box = element("article", "answer waiting");
    const head = element("header", "");
    const text = element("div", "text");
    const figures = element("span", "figures faint");
    const copy = element("button", "copy", "Copy");
    copy.type = "button";
    copy.hidden = true;
    copy.ariaLabel = `Copy the answer of ${answer.model}`;
    copy.addEventListener("click", () => copyText(answer.text, copy));
    text.dir = "auto";
    text.append(""); // the text node that grows
    const name = element("b", "", answer.model.split("/").pop()); // without the owner of a hub id
    name.title = visible(answer.model);
    head.append(name, figures, copy);
    box.append(head, text);
    answers.append(box);
    return { box, text, figures, copy };
  });
  const question = element("div", "question text", round.question);
  question.dir = "auto";
  $("rounds").append(question, answers);
  following = true;
  showEnd();
  return views;
}

// Follows the growing text, unless the reader has scrolled up.
let following = true;
function showEnd() {
  if (following) $("rounds").scrollTop = $("rounds").scrollHeight;
}
$("rounds").addEventListener("scroll", ({ target }) => {
  following = target.scrollHeight - target.scrollTop - target.clientHeight < 80;
});
new ResizeObserver(showEnd).observe($("rounds"));

function showState() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("new").disabled = running !== null;
  $("save").disabled = running !== null || !rounds.length;
  $("rounds").setAttribute("aria-busy", String(running !== null));
  document.body.classList.toggle("single", modelsChosen().length < 2);
}

function startAgain() {
  rounds = [];
  $("rounds").replaceChildren($("hint"));
  $("hint").hidden = false;
  $("status").textContent = "";
  showState();
  $("message").focus();
}

// One row for each column, in the format `messages` that `trillora train` reads.
function save() {
  const columns = Math.max(0, ...rounds.map((round) => round.answers.length));
  const lines = [];
  for (let column = 0; column < columns; column++) {
    const messages = conversation(column);
    const model = rounds.findLast((round) => round.answers[column])?.answers[column].model;
    if (messages.some(({ role }) => role === "assistant")) lines.push(JSON.stringify({ messages, model }) + "\n");
  }
  if (!lines.length) {
    $("status").textContent = "There is no answer to save yet.";
    return;
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  link.download = "chat.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  $("status").textContent = `chat.jsonl: ${lines.length} conversation${lines.length === 1 ? "" : "s"}`;
}

async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have a clipboard only for https and loopback addresses; elsewhere a selection can be copied.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  button.textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Start, key, report

function fillModels(ids) {
  const [left, right] = document.querySelectorAll("select.model");
  const option = (id, label = id) => new Option(visible(label), id);
  left.replaceChildren(...ids.map((id) => option(id)));
  right.replaceChildren(option(NONE, "no second model"), ...ids.map((id) => option(id)));
  right.value = ids[1] ?? NONE;
  right.closest("label").hidden = ids.length < 2;
  left.closest(".models").hidden = false;
  showState();
}

// The system message that the rows of all adapters had in training, if it is one and the same.
function fillSystem(messages) {
  const [message] = messages;
  if (messages.size !== 1 || !message || $("system").value) return;
  $("system").value = message;
  $("hint").textContent += " The system message of the training is set in Settings.";
}

async function start() {
  try {
    const { data } = await (await request("v1/models")).json();
    fillModels(data.map((model) => model.id));
    fillSystem(new Set(data.filter((model) => model.parent).map((model) => model.system_message)));
    $("status").textContent = "";
    return true;
  } catch (error) {
    if (error.status === 401) askForKey("This key is not accepted.");
    else $("status").textContent = visible(error.message);
    return false;
  }
}

function askForKey(note) {
  key = "";
  if (note) $("key-note").textContent = note;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

async function showView() {
  const isReport = location.hash === "#report" && document.body.dataset.hasReport === "true";
  $("chat-view").hidden = isReport;
  $("report-view").hidden = !isReport;
  for (const link of document.querySelectorAll("#tabs a")) {
    if ((link.hash === "#report") === isReport) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isReport || (needsKey && !key)) return;
  const note = $("report-note");
  const frame = $("report");
  try {
    const html = await (await request("report")).text();
    frame.srcdoc = policy ? policy.createHTML(html) : html; // the frame has no scripts: see `sandbox`
    note.hidden = true;
  } catch (error) {
    note.hidden = false;
    note.textContent = visible(error.message);
    if (error.status === 401) askForKey("");
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startAgain);
$("save").addEventListener("click", save);
for (const select of document.querySelectorAll("select.model")) select.addEventListener("change", showState);
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = $("key").value;
  if (!(await start())) return;
  $("key").value = "";
  $("key-dialog").close();
  showView();
});
$("key-dialog").addEventListener("close", () => {
  if (!key) askForKey(""); // nothing works without it
});
window.addEventListener("hashchange", showView);

$("tabs").hidden = document.body.dataset.hasReport !== "true";
showState();
showView();
if (needsKey) askForKey("");
else start();
$("message").focus();
