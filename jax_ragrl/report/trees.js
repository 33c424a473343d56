"use strict";
// Trees of training rollouts: filters, a drawing, and the nested decisions.
const LEAVES = [["", "all"], ["differ", "rewards differ"], ["wrong", "all reward 0 or less"],
  ["right", "all with reward"], ["malformed", "malformed action"], ["unanswered", "some without an answer"]];
const LEVEL = 104, ROW = 38; // pixels
const SVG = document.getElementById("blank").namespaceURI;

const leavesOf = (tree) => tree.nodes.filter((node) => node.role === "leaf");

function hasLeaves(tree, outcome) {
  const leaves = leavesOf(tree);
  switch (outcome) {
    case "": return true;
    case "differ": return tree.spread > 0;
    case "wrong": return leaves.every((leaf) => !(leaf.reward > 0));
    case "right": return leaves.length > 0 && leaves.every((leaf) => leaf.reward > 0);
    case "malformed": return tree.nodes.some((node) => node.role !== "leaf" && node.why);
    default: return leaves.some((leaf) => leaf.answer === undefined);
  }
}

function isWantedTree(tree, words) {
  const least = controls.credit.value === "" ? -1 : Number(controls.credit.value);
  return tree.credit >= least
    && (controls.run.value === "" || String(tree.source) === controls.run.value)
    && (controls.step.value === "" || String(tree.step) === controls.step.value)
    && (controls.hops.value === "" || String(tree.hops) === controls.hops.value)
    && hasLeaves(tree, controls.leaves.value)
    && words.every((word) => tree.haystack.includes(word));
}

function treeMarks(tree) {
  const values = leavesOf(tree).map((leaf) => leaf.reward).filter(known);
  const total = values.reduce((a, b) => a + b, 0);
  const line = element("span", undefined, "marks");
  line.append(element("span", `spread ${short(tree.spread)}`, tree.spread > 0 ? "good" : ""),
    `  mean reward ${values.length ? short(total / values.length) : "–"}  credit to ${short(tree.credit)}  step ${tree.step}`);
  return line;
}

const short = (x) => String(Math.round(1000 * x) / 1000);

// The color of credit: its sign and size, or its distance from 1/2 if no credit is negative.
function tint(credit) {
  if (!known(credit)) return ["", 0];
  const share = data.hasNegativeCredit ? credit / data.maxCredit : 2 * credit / data.maxCredit - 1;
  return [share >= 0 ? "positive" : "negative", Math.round(100 * Math.min(Math.abs(share), 1))];
}

const rewardTint = (leaf) => known(leaf.reward) ? [leaf.reward > 0 ? "positive" : "negative", 100] : ["", 0];

function childrenOf(tree) {
  const ids = new Set(tree.nodes.map((node) => node.id)), below = new Map([[null, []]]);
  for (const node of tree.nodes) {
    const parent = ids.has(node.parent) && node.parent !== node.id ? node.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(node);
  }
  return below;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function sketch(below) {
  const places = new Map(), edges = [], marks = [];
  let rows = 0, levels = 0;
  const place = (node, level) => {
    levels = Math.max(levels, level);
    const own = (below.get(node.id) || []).map((child) => place(child, level + 1));
    const y = own.length ? (own[0] + own.at(-1)) / 2 : 24 + ROW * rows++;
    places.set(node, [20 + LEVEL * level, y]);
    return y;
  };
  for (const root of below.get(null)) place(root, 0);
  for (const [node, [x, y]] of places) {
    for (const child of below.get(node.id) || []) {
      const [x2, y2] = places.get(child), middle = (x + x2) / 2;
      edges.push(shape("path", { d: `M${x},${y}C${middle},${y} ${middle},${y2} ${x2},${y2}` }));
    }
    const isLeaf = node.role === "leaf", [side, strength] = isLeaf ? rewardTint(node) : tint(node.credit);
    const mark = isLeaf ? shape("rect", { x: x - 7, y: y - 7, width: 14, height: 14, rx: 3 })
      : shape("circle", { cx: x, cy: y, r: 8 });
    mark.setAttribute("class", `mark ${side}`);
    mark.setAttribute("style", `--w:${strength}%`);
    mark.append(shape("title", {}, isLeaf ? `reward ${node.reward}` : `${node.role}, credit ${known(node.credit) ? short(node.credit) : "none"}`));
    mark.onclick = () => choose(node);
    const label = isLeaf ? (node.answer ?? node.why ?? "no answer").slice(0, 24) : node.role;
    marks.push(mark, isLeaf ? shape("text", { x: x + 13, y: y + 4 }, label)
      : shape("text", { x, y: y - 12, "text-anchor": "middle" }, label));
  }
  const width = 40 + LEVEL * levels + 170, height = 20 + ROW * rows;
  const picture = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "the tree" });
  picture.append(...edges, ...marks);
  return picture;
}

function choose(node) {
  document.querySelector(".node.chosen")?.classList.remove("chosen");
  node.box.classList.add("chosen");
  node.box.scrollIntoView({ block: "center" });
}

function nodeBox(node) {
  const box = element("div", undefined, "node"), [side, strength] = tint(node.credit);
  node.box = box;
  if (node.role !== "leaf") {
    const credit = element("span", known(node.credit) ? short(node.credit) : "not trained", `credit ${side}`);
    credit.setAttribute("style", `--w:${strength}%`);
    box.append(credit);
  }
  box.append(element("b", node.role));
  if (node.forced) box.append(element("span", "forced", "tag"));
  if (node.multiplicity > 1) box.append(element("span", `× ${node.multiplicity}`, "tag"));
  if (node.role === "leaf") {
    box.append(element("span", `reward ${known(node.reward) ? short(node.reward) : "–"}`, node.reward > 0 ? "tag good" : "tag bad"),
      element("div", node.answer ?? "(no answer)", "answer"));
  } else box.append(element("pre", node.text || ""));
  if (node.why && node.why !== "answered") box.append(faultLine(node.why));
  if (node.prompt !== undefined) box.append(folded("prompt", () => [element("pre", data.texts[node.prompt])]));
  if (node.passages) {
    box.append(folded(`${node.passages.length} passages`, () => node.passages.map((i, n) => {
      const [, title, text] = data.passages[i];
      return element("p", `${node.kept[n] ? "✓ " : ""}${title}: ${text}`);
    })));
  }
  if (node.calls) box.append(folded(`${node.calls.length} ${node.calls.length === 1 ? "call" : "calls"} on the way`, () => node.calls.map((call) => element("p", call.join(": ")))));
  return box;
}

function nodeList(nodes, below) {
  const list = element("ul", undefined, "nodes");
  for (const node of nodes) {
    const item = element("li"), children = below.get(node.id);
    item.append(nodeBox(node));
    if (children) item.append(nodeList(children, below));
    list.append(item);
  }
  return list;
}

function treeDetail(tree) {
  const below = childrenOf(tree), frame = element("div", undefined, "sketch");
  const facts = [`Gold: ${(tree.answers || []).join(" · ") || "none"}`, `step ${tree.step}`];
  if (tree.hops) facts.push(`${tree.hops} ${tree.hops === 1 ? "hop" : "hops"}`);
  if (data.runs.length > 1) facts.push(data.runs[tree.source]);
  frame.append(sketch(below));
  return [element("h2", tree.question), element("div", facts.join("; "), "facts"), frame, nodeList(below.get(null), below)];
}
