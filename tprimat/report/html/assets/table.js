// Sorting inside each workload, filtering by words, copying commands.
const rowsOf = body => [...body.querySelectorAll("tr[data-group]")];
const allRows = () => [...document.querySelectorAll("#ranking tr[data-group]")];

function sortBy(heading) {
  const direction = heading.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
  const textual = heading.firstElementChild.dataset.kind === "text";
  const sign = direction === "ascending" ? 1 : -1;
  for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", direction);
  const key = row => row.children[heading.cellIndex].dataset.sort;
  const compare = (a, b) => {
    if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
    return sign * (textual ? key(a).localeCompare(key(b), undefined, { numeric: true }) : key(a) - key(b));
  };
  for (const body of document.querySelectorAll("#ranking tbody")) body.append(...rowsOf(body).sort(compare));
  document.dispatchEvent(new Event("chosen"));
}

function filterRows() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of allRows()) {
    const text = `${row.closest("tbody").querySelector(".workload").textContent} ${row.textContent}`.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
  for (const body of document.querySelectorAll("#ranking tbody")) body.hidden = rowsOf(body).every(row => row.hidden);
  const rows = allRows();
  document.getElementById("shown").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  document.dispatchEvent(new Event("chosen"));
}

for (const button of document.querySelectorAll("#ranking thead button")) {
  button.addEventListener("click", () => sortBy(button.parentElement));
}
const filters = document.getElementById("filters");
filters?.addEventListener("input", filterRows);
filters?.addEventListener("submit", event => event.preventDefault());

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try { await navigator.clipboard.writeText(code.textContent); } catch { document.execCommand("copy"); }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
