const get = id => document.getElementById(id);
const add = (parent, tag, text, kind) => {
  const element = parent.appendChild(document.createElement(tag));
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const isScore = name => name.startsWith("score:") || name === "retrieval_score";
const show = value => value === null || value === undefined ? "" : String(value);
function describe(parent, row) {
  add(parent, "span", show(row.title ?? row.item));
  const rest = Object.entries(row).filter(([name]) => !isScore(name) && !["item", "title"].includes(name));
  const parts = [row.title === undefined ? "" : show(row.item), ...rest.map(([, value]) => show(value))];
  const text = parts.filter(Boolean).join(" · ");
  if (text) { parent.append(" "); add(parent, "small", text); }
}
function fill(found) {
  const table = get("items");
  table.replaceChildren();
  const scores = Object.keys(found.items[0] ?? {}).filter(isScore);
  const head = add(table, "tr");
  add(head, "th", "#", "number");
  add(head, "th", "Item");
  scores.forEach(name => add(head, "th", name.replace("score:", "").replace("_", " "), "number"));
  found.items.forEach((row, place) => {
    const line = add(table, "tr");
    add(line, "td", place + 1, "number");
    describe(add(line, "td"), row);
    scores.forEach(name => add(line, "td", row[name].toFixed(4), "number"));
  });
  const all = Object.entries(found.histories);
  get("histories").replaceChildren();
  (all.length ? all : [["", []]]).forEach(([name, rows]) => {
    add(get("histories"), "h2", (all.length > 1 ? name.replaceAll("_", " ") : "History") + ", newest first");
    const list = add(get("histories"), "ol");
    rows.forEach(row => describe(add(list, "li"), row));
    if (!rows.length) add(list, "li", "nothing is known").style.listStyle = "none";
  });
}
let token = "";
const fetchAs = (path, options = {}) =>
  fetch(path, token ? {...options, headers: {...options.headers, Authorization: `Bearer ${token}`}} : options);
async function ask(path, options) {
  let answer = await fetchAs(path, options);
  if (answer.status === 401 && (token = prompt("Token of this server") ?? "")) answer = await fetchAs(path, options);
  return answer;
}
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$/;
// Whole numbers may have more digits than a number of JavaScript: they are sent as they are typed.
const write = (text, type) => type !== "string" && NUMBER.test(text) ? text : JSON.stringify(text);
const readValue = (text, input) => input.is_list
  ? `[${text.split("|").filter(Boolean).map(one => write(one.trim(), input.type)).join(",")}]` : write(text, input.type);
let inputs;
async function listInputs(answer) {  // What the models read of a request beside the user.
  if (inputs || !answer.ok) return;
  inputs = (await answer.json()).inputs;
  inputs.forEach(input => {
    const label = add(get("context"), "label", `${input.name.replaceAll("_", " ")} `);
    const field = add(label, "input");
    field.id = `input:${input.name}`;
    field.required = input.is_required;
    field.autocomplete = "off";
    field.placeholder = input.is_list ? "a|b|c" : input.is_time ? "2026-01-31T10:00" : input.type === "string" ? "" : "number";
    field.value = new URLSearchParams(location.search).get(input.name) ?? "";
  });
}
function writeRequest() {
  const given = (inputs ?? []).map(input => [input, get(`input:${input.name}`).value.trim()]).filter(([, text]) => text);
  const features = given.map(([input, text]) => `${JSON.stringify(input.name)}:${readValue(text, input)}`).join(",");
  return `{"user":${JSON.stringify(get("user").value)},"k":${get("k").value || 10},"seen":${get("seen").checked},"features":{${features}}}`;
}
get("form").addEventListener("submit", async event => {
  event.preventDefault();
  const status = get("status"), start = performance.now();
  let answer, found;
  try {
    if (!inputs) await listInputs(await ask("/v1/recommend/inputs"));
    answer = await ask("/v1/recommend", {method: "POST", headers: {"Content-Type": "application/json"}, body: writeRequest()});
    found = await answer.json();
  } catch (error) {
    found = {error: "the server does not answer"};
  }
  const isRight = answer !== undefined && answer.ok;
  status.className = isRight ? "" : "error";
  document.querySelector("main").hidden = !isRight;
  if (!isRight) { status.textContent = found.error; return; }
  fill(found);
  const models = found.models.map(model => `${model.name}, version ${model.version}`).join(" · ");
  const known = found.known ? "" : " · the models do not know this user";
  status.textContent = `${found.items.length} items by ${models}${known} · ${Math.round(performance.now() - start)} ms`;
});
// A server that wants a token says no, without asking a person who only looks at the page.
fetchAs("/v1/recommend/inputs").then(listInputs).catch(() => undefined).then(() => {
  const linked = new URLSearchParams(location.search).get("user");
  if (linked) {
    get("user").value = linked;
    get("form").requestSubmit();
  }
});
