"use strict";
// Shows what the run has written since; parts that are open stay open, and the page does not move.
const PERIOD = 3000; // milliseconds
const parts = () => [...document.querySelectorAll("main details.step, main details.tree")];
const nameOf = (part) => part.querySelector("summary").textContent;

function status(text) {
  document.getElementById("live").textContent = text;
}

function replace(page) {
  const isOpen = new Map(parts().map((part) => [nameOf(part), part.open]));
  const { scrollX, scrollY } = window;
  document.querySelector("main").replaceWith(page.querySelector("main"));
  for (const part of parts()) part.open = isOpen.get(nameOf(part)) ?? part.open;
  window.scrollTo({ left: scrollX, top: scrollY, behavior: "instant" });
}

async function get(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  return reply.text();
}

async function look() {
  // A tab in the background asks nothing; it is up to date soon after it is shown.
  if (document.hidden) return;
  try {
    const version = await get("version");
    if (version !== document.querySelector("main").dataset.version) {
      replace(new DOMParser().parseFromString(await get("."), "text/html"));
    }
    status(`live, ${new Date().toLocaleTimeString()}`);
  } catch (error) {
    status("the server has ended or cannot be reached");
  }
}

setInterval(look, PERIOD);
document.addEventListener("visibilitychange", look);
