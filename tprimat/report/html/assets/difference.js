// Differences between two runs, by section.
const SECTIONS = ["configuration", "environment", "evidence"];

function showDifference() {
  const data = pageData();
  const [one, other] = ["first-run", "second-run"].map(id => data.runs[document.getElementById(id).value]);
  const all = document.getElementById("same").checked;
  const rows = data.keys.map(([section, key], place) => ({ section, key, a: one.fields[place], b: other.fields[place] }))
    .filter(row => (row.a ?? row.b) !== undefined && (all || row.a !== row.b));
  const parts = SECTIONS.map(section => differenceTable(section, rows.filter(row => row.section === section), one, other));
  const found = parts.filter(Boolean);
  document.getElementById("difference").replaceChildren(...(found.length ? found : [make("p", {}, "Their records are equal.")]));
}

function differenceTable(section, rows, one, other) {
  if (!rows.length) return null;
  const cell = text => make("td", {}, text ?? "–");
  const head = make("tr", {}, ...[section, one.name, other.name].map(name => make("th", { scope: "col" }, name)));
  const body = rows.map(row => make("tr", row.a === row.b ? {} : { class: "changed" },
    make("th", { scope: "row" }, row.key.replaceAll("_", " ").replaceAll(".", " · ")), cell(row.a), cell(row.b)));
  return make("div", { class: "scroll" }, make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

const pick = document.getElementById("pick");
if (pick) {
  pick.addEventListener("input", showDifference);
  pick.addEventListener("submit", event => event.preventDefault());
  showDifference();
}
