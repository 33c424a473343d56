// The explorer: filters, the list, and the question that is shown. `trees.js` comes before.
const data = JSON.parse(document.getElementById("data").textContent);
const PAGE = 30; // entries of the list that are built at once: more than a screen shows
const METRICS = { f1: "F1", em: "EM", cover_em: "cover-EM", cover_em_tokens: "cover-EM", judge: "judge" };
const get = (id) => document.getElementById(id);
const controls = Object.fromEntries(
  ["view", "search", "first", "second", "metric", "outcome", "strategy", "kind", "hops", "run", "step", "leaves", "credit"]
    .map((id) => [id, get(id)]));
const VIEWS = { answers: ["first", "second", "metric", "outcome", "strategy", "kind"], trees: ["run", "step", "leaves", "credit"] };
let matches = [], shown = 0, current = null, addressTimer = 0;

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text; // never HTML: texts of models and documents
  if (className) node.className = className;
  return node;
}

function fill(id, pairs) {
  controls[id].replaceChildren(...pairs.map(([value, text]) => {
    const option = element("option", text);
    option.value = value;
    return option;
  }));
  controls[id].hasChoice = pairs.length > 1;
}

function distinct(values) {
  return [...new Set(values)].filter((x) => x !== null && x !== "" && x !== 0).sort();
}

// 1. Prepare: predictions by source, and the text that the search reads.
const metrics = new Set();
for (const question of data.questions) {
  question.of = new Map(question.rows);
  for (const [, row] of question.rows) Object.keys(row.scores).forEach((name) => metrics.add(name));
  const passages = new Set(question.rows.flatMap(([, row]) => row.passages));
  question.haystack = [question.text, ...question.gold,
    ...question.rows.map(([, row]) => row.answer || ""),
    ...[...passages].map((i) => data.passages[i][1])].join("\n").toLowerCase();
}
for (const tree of data.trees) {
  tree.haystack = [tree.question, ...(tree.answers || []), ...tree.nodes.flatMap((n) => [n.text || "", n.answer || ""])]
    .join("\n").toLowerCase();
}
const credits = data.trees.flatMap((tree) => tree.nodes.map((node) => node.credit)).filter((x) => typeof x === "number");
data.hasNegativeCredit = credits.some((x) => x < 0);
data.maxCredit = credits.reduce((a, b) => Math.max(a, Math.abs(b)), 1);
const byNumber = new Intl.Collator("en", { numeric: true }); // dev-5 before dev-10
const sources = data.sources.map((name, i) => [String(i), name]).sort((a, b) => byNumber.compare(a[1], b[1]));
const all = [["", "all"]];
fill("first", sources);
fill("second", [["", "nothing"], ...sources]);
// A quickstart is opened as a comparison of the trained policy with its warm start.
for (const [id, name] of [["first", "trained"], ["second", "warm_start"]]) {
  const number = data.sources.findIndex((label) => label === name || label.endsWith(`/${name}`));
  if (number >= 0) controls[id].value = String(number);
}
fill("metric", [...metrics].sort((a, b) => (b === "f1") - (a === "f1")).map((name) => [name, METRICS[name] || name]));
fill("kind", [...all, ...distinct(data.questions.map((q) => q.kind)).map((x) => [x, x])]);
const numbers = (values) => [...all, ...distinct(values).map((x) => [String(x), String(x)])];
fill("hops", numbers([...data.questions, ...data.trees].map((q) => q.hops)));
fill("view", [["answers", "answers", data.questions], ["trees", "training trees", data.trees]].filter(([, , x]) => x.length));
fill("run", data.runs.length < 2 ? all : [...all, ...data.runs.map((name, i) => [String(i), name])]);
fill("step", numbers(data.trees.map((tree) => tree.step)).sort((a, b) => Number(a[0]) - Number(b[0])));
fill("leaves", LEAVES);
const strategies = data.questions.flatMap((q) => q.rows.map(([, row]) => row.strategy));
fill("strategy", [...all, ...distinct(strategies).map((x) => [x, x])]);
const OUTCOMES = [["", "all"], ["wrong", "wrong (score 0)"], ["right", "right (score 1)"],
  ["malformed", "malformed action"], ["failed", "environment failed"]];
const MISTAKE = "mistake: ";
const mistakes = distinct(data.questions.flatMap((q) => q.rows.map(([, row]) => row.mistake)));
OUTCOMES.push(...mistakes.filter(Boolean).map((x) => [MISTAKE + x, MISTAKE + x.replace("_", " ")]));
const COMPARED = [["better", "better"], ["worse", "worse"], ["differs", "other answer"]];

// 2. Filter.
const row = (question, control) => question.of.get(Number(control.value));
const score = (prediction) => prediction && prediction.scores[controls.metric.value];
const known = (x) => typeof x === "number";

function hasOutcome(question, outcome) {
  const first = row(question, controls.first);
  const second = controls.second.value === "" ? undefined : row(question, controls.second);
  if (outcome.startsWith(MISTAKE)) return first.mistake === outcome.slice(MISTAKE.length);
  switch (outcome) {
    case "": return true;
    case "wrong": return score(first) === 0;
    case "right": return score(first) === 1;
    case "malformed": return first.faults.length > 0 && first.finish_reason !== "failed";
    case "failed": return first.finish_reason === "failed";
    case "better": return second && score(first) > score(second);
    case "worse": return second && score(first) < score(second);
    default: return second && first.answer !== second.answer;
  }
}

function isWanted(question, words) {
  const first = row(question, controls.first);
  return first !== undefined
    && (controls.kind.value === "" || question.kind === controls.kind.value)
    && (controls.hops.value === "" || String(question.hops) === controls.hops.value)
    && (controls.strategy.value === "" || first.strategy === controls.strategy.value)
    && hasOutcome(question, controls.outcome.value)
    && words.every((word) => question.haystack.includes(word));
}

function mean(values) {
  const finite = values.filter(known);
  return finite.length ? (100 * finite.reduce((a, b) => a + b, 0) / finite.length).toFixed(1) : "–";
}

const showsTrees = () => controls.view.value === "trees";

// A control is shown if its view is, and if it offers a choice.
function showControls() {
  for (const [view, ids] of Object.entries(VIEWS)) {
    for (const id of ids) {
      const hasChoice = controls[id].tagName === "INPUT" || controls[id].hasChoice;
      controls[id].parentElement.hidden = view !== (showsTrees() ? "trees" : "answers") || !hasChoice;
    }
  }
  for (const id of ["view", "hops"]) controls[id].parentElement.hidden = !controls[id].hasChoice;
}

function refresh() {
  const start = performance.now();
  const words = controls.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  if (showsTrees()) findTrees(words);
  else findQuestions(words);
  showControls();
  shown = 0;
  get("list").replaceChildren();
  grow();
  if (!matches.length) get("list").append(element("li", `No ${showsTrees() ? "tree" : "question"} matches.`, "empty"));
  if (!matches.includes(current)) current = matches[0] || null;
  show(current, false);
  // Not at each letter of a search: browsers take milliseconds, and refuse many changes in a row.
  clearTimeout(addressTimer);
  addressTimer = setTimeout(keepAddress, 300);
  if (data.limit) get("count").textContent += ` (texts are cut after ${data.limit} characters)`;
  get("count").dataset.ms = (performance.now() - start).toFixed(1);
}

// The address keeps the filters, so that a link or a bookmark shows the same questions.
function keepAddress() {
  const values = Object.entries(controls).map(([id, control]) => [id, control.value]).filter(([, x]) => x !== "");
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
}

function findTrees(words) {
  matches = data.trees.filter((tree) => isWantedTree(tree, words));
  const differ = matches.filter((tree) => tree.spread > 0).length;
  get("count").textContent = `${matches.length} of ${data.trees.length} trees, rewards differ in ${differ}`;
}

// Outcomes that compare two sources are offered while two are chosen.
function offerOutcomes(compared) {
  const options = compared ? [...OUTCOMES, ...COMPARED] : OUTCOMES, outcome = controls.outcome.value;
  if (controls.outcome.length === options.length) return;
  fill("outcome", options);
  controls.outcome.value = options.some(([value]) => value === outcome) ? outcome : "";
}

function findQuestions(words) {
  const compared = controls.second.value !== "";
  offerOutcomes(compared);
  matches = data.questions.filter((question) => isWanted(question, words));
  const name = METRICS[controls.metric.value] || controls.metric.value;
  const means = [mean(matches.map((q) => score(row(q, controls.first))))];
  if (compared) means.push(mean(matches.map((q) => score(row(q, controls.second)))));
  get("count").textContent = `${matches.length} of ${data.questions.length} questions, mean ${name} ${means.join(" against ")}`;
}

// 3. The list: a page at a time, so that thousands of questions stay fast.
function marks(question) {
  const line = element("span", undefined, "marks");
  for (const control of [controls.first, controls.second]) {
    const prediction = control.value === "" ? undefined : row(question, control);
    if (!prediction) continue;
    const value = score(prediction);
    const text = prediction.answer === null ? "no answer" : prediction.answer;
    const mark = known(value) ? `${(100 * value).toFixed(0)}` : "failed";
    line.append(element("span", mark, value > 0.5 ? "good" : "bad"), element("span", ` ${text.slice(0, 60)}  `));
  }
  return line;
}

function grow() {
  const list = get("list");
  list.querySelector(".more")?.parentElement.remove();
  const end = Math.min(shown + PAGE, matches.length);
  for (; shown < end; shown++) {
    const question = matches[shown], item = element("li"), button = element("button", question.text ?? question.question);
    button.append(question.nodes ? treeMarks(question) : marks(question));
    button.onclick = () => show(question, true);
    question.button = button;
    item.append(button);
    list.append(item);
  }
  if (shown < matches.length) {
    const item = element("li"), button = element("button", `${matches.length - shown} more`, "more");
    button.onclick = grow;
    item.append(button);
    list.append(item);
  }
}

// 4. The question that is shown.
function show(question, reading) {
  current?.button?.removeAttribute("aria-current");
  current = question;
  document.body.classList.toggle("reading", reading);
  const detail = get("detail");
  detail.replaceChildren();
  if (!question) return;
  question.button?.setAttribute("aria-current", "true");
  const back = element("button", "Back to the list");
  back.id = "back";
  back.onclick = () => show(current, false);
  detail.append(back, ...(question.nodes ? treeDetail(question) : answerDetail(question)));
  // At the end, because both compute the layout of the page.
  detail.scrollTop = 0;
  question.button?.scrollIntoView({ block: "nearest" });
}

function answerDetail(question) {
  const facts = [`Gold: ${question.gold.join(" · ") || "none"}`];
  if (question.hops) facts.push(`${question.hops} ${question.hops === 1 ? "hop" : "hops"}`);
  if (question.kind) facts.push(question.kind);
  const columns = element("div", undefined, "columns");
  for (const control of [controls.first, controls.second]) {
    const prediction = control.value === "" ? undefined : row(question, control);
    if (prediction) columns.append(card(data.sources[control.value], prediction));
  }
  return [element("h2", question.text), element("div", facts.join("; "), "facts"), columns];
}

function card(source, prediction) {
  const box = element("article", undefined, "card"), value = score(prediction);
  box.append(element("h3", source));
  box.append(element("div", prediction.answer === null ? "(no answer)" : prediction.answer, "answer"));
  const tags = element("div");
  for (const [name, x] of Object.entries(prediction.scores)) {
    if (name === "cover_em_tokens") continue;
    tags.append(element("span", `${METRICS[name] || name} ${known(x) ? (100 * x).toFixed(0) : "–"}`,
      name === controls.metric.value ? `tag ${value > 0.5 ? "good" : "bad"}` : "tag"));
  }
  if (prediction.strategy) tags.append(element("span", prediction.strategy, "tag"));
  if (prediction.finish_reason !== "answered") tags.append(element("span", prediction.finish_reason, "tag bad"));
  for (const fault of prediction.faults) tags.append(element("span", fault, "tag bad"));
  const kinds = [...new Set([prediction.finish_reason, ...prediction.faults])].filter((kind) => data.faults[kind]);
  box.append(tags, ...kinds.map(faultLine), element("h3", "Trace"), trace(prediction.steps));
  if (prediction.passages.length) box.append(element("h3", "Passages"), ...passageList(prediction));
  const costs = Object.entries(prediction.costs).filter(([, x]) => x).map(([name, x]) => `${name.replaceAll("_", " ")} ${x}`);
  box.append(element("h3", "Costs"), element("div", costs.join(", ") || "none", "facts"));
  return box;
}

// A kind of fault with its sentence of the glossary.
function faultLine(kind) {
  const line = element("div", undefined, "fault");
  line.append(element("b", kind), data.faults[kind] ? `: ${data.faults[kind]}` : "");
  return line;
}

// Contents are built when they are opened: prompts and passages are long.
function folded(title, build) {
  const more = element("details");
  more.append(element("summary", title));
  more.addEventListener("toggle", () => more.append(...build()), { once: true });
  return more;
}

function trace(steps) {
  const list = element("ol");
  for (const step of steps) {
    const item = element("li", undefined, "step");
    item.append(element("b", step.role + (step.fault ? ` (${step.fault})` : "")));
    if (step.query !== undefined) item.append(element("pre", `${step.query}\n→ ${step.passages.map((p) => p.title).join(", ")}`));
    else item.append(element("pre", step.text ?? step.reply));
    if (step.prompt) item.append(folded("prompt", () => [element("pre", step.prompt)]));
    list.append(item);
  }
  return list;
}

function passageList(prediction) {
  return prediction.passages.map((i) => {
    const [id, title, text] = data.passages[i], more = folded(title || id, () => [element("p", text)]);
    if (prediction.gold_passages.includes(i)) more.firstChild.append(" ", element("span", "gold", "tag good"));
    return more;
  });
}

// 5. Events.
for (const control of Object.values(controls)) control.addEventListener("input", refresh);
document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "/" && !isTyping) { event.preventDefault(); controls.search.focus(); }
  if (event.key === "Escape") { event.target.blur(); show(current, false); }
  const move = { j: 1, k: -1 }[event.key];
  if (!move || isTyping || !matches.length) return;
  const next = Math.min(Math.max(matches.indexOf(current) + move, 0), matches.length - 1);
  if (next >= shown) grow();
  show(matches[next], document.body.classList.contains("reading"));
});
fill("outcome", [...OUTCOMES, ...COMPARED]);
for (const [id, value] of new URLSearchParams(location.hash.slice(1))) if (id in controls) controls[id].value = value;
refresh();
