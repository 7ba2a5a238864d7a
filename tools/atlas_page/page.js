"use strict";
const table = document.getElementById("atlas");
const body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
const rows = [...body.rows];
const search = document.getElementById("search");
const slice = document.getElementById("slice");
const fitting = document.getElementById("fitting");

// Numbers by value, words by alphabet. Empty cells come last in both directions.
function compare(a, b, column, direction) {
  const [x, y] = [a.cells[column].dataset.value, b.cells[column].dataset.value];
  if (x === "" || y === "") return (x === "") - (y === "");
  const numbers = [Number(x), Number(y)];
  if (numbers.every(Number.isFinite)) return direction * (numbers[0] - numbers[1]);
  return direction * x.localeCompare(y, "en");
}

function sortBy(column) {
  const direction = heads[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
  heads.forEach((head) => head.setAttribute("aria-sort", "none"));
  heads[column].setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  rows.sort((a, b) => compare(a, b, column, direction));
  body.append(...rows);
}

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) ||
      (slice.value !== "" && row.cells[2].textContent !== slice.value) ||
      (fitting.checked && row.cells[3].dataset.value !== "GO");
    shown += row.hidden ? 0 : 1;
  }
  document.getElementById("count").textContent = `${shown} of ${rows.length}`;
}

heads.forEach((head, column) => head.firstChild.addEventListener("click", () => sortBy(column)));
[search, slice, fitting].forEach((control) => control.addEventListener("input", filter));
filter();
