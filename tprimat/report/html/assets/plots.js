// Panels are drawn when they come into view, or when the browser is idle, and again when the filter, the width or the theme changes.
const DASHES = { "-": "solid", "--": "dash", ":": "dot", "-.": "dashdot" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const LOG_TICKS = [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4].flatMap(power => [1, 2, 5].map(digit => Number(`${digit}e${power}`)));
const BARE = { showticklabels: false, showgrid: false, zeroline: false }; // Plotly numbers the axes of an empty panel from -1
const LOG_SPAN = 5; // as in plots/comparison.py: less of a log axis may hold one of these ticks, or none
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const narrow = () => innerWidth < 640;
let printing = false;

const theme = () => {
  const night = dark.matches && !printing;
  return night ? { ink: "#e6ebf1", soft: "#9fadbc", rule: "#303b47", card: "#19212a" }
               : { ink: "#16202c", soft: "#566474", rule: "#dde2e8", card: "#ffffff" };
};

const visiblePlaces = () => allRows().filter(row => !row.hidden).map(row => Number(row.dataset.group));

// Curves are those of one workload: the first that the filter leaves. Unlike work never shares a panel.
const curvePlaces = data => {
  const places = visiblePlaces();
  return places.filter(place => data.groups[place].work === data.groups[places[0]].work).slice(0, data.most);
};

function base(look, height) {
  const axis = { gridcolor: look.rule, linecolor: look.rule, zeroline: false, tickcolor: look.rule, automargin: true, title: { standoff: 8 } };
  return {
    height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, margin: { l: 8, r: 12, t: 8, b: 8 },
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif", size: 12, color: look.soft },
    hoverlabel: { bgcolor: look.card, bordercolor: look.rule, font: { color: look.ink }, namelength: -1, align: "left" },
    xaxis: { ...axis }, yaxis: { ...axis }, modebar: { bgcolor: look.card, color: look.soft, activecolor: look.ink },
  };
}

// Rows are as high as their words: the workload above its first row, the whole name of each configuration above its bar.
function bars(data, index, look) {
  const panel = data.bars[index];
  const places = visiblePlaces().slice(0, data.mostBars);
  const rows = places.map(place => ({ ...panel.rows[place], group: data.groups[place] }));
  const dense = rows.length > 10;
  const [room, thick] = [narrow() ? 44 : 66, dense ? 12 : 18];
  const [annotations, traces] = [[], []];
  let down = 0;
  const write = (lines, color) => {
    annotations.push({ xref: "paper", x: 0, xanchor: "left", y: down, yanchor: "top", showarrow: false, align: "left", borderpad: 0,
      text: lines.map(line => `<span style="color:${color}">${line}</span>`).join("<br>") });
    down += LINE_PIXELS * lines.length;
  };
  rows.forEach((row, place) => {
    if (row.group.title && row.group.work !== rows[place - 1]?.group.work) {
      write(broken(row.group.title, room).map(line => `<i>${line}</i>`), look.soft);
      down += 4;
    }
    write(barLabel(row, look, dense, room), look.soft);
    traces.push(bar(row, down + 4, thick, look));
    down += thick + 16;
  });
  const layout = base(look, down + 58);
  layout.annotations = annotations;
  layout.yaxis = { ...layout.yaxis, range: [Math.max(down, 1), 0], showticklabels: false, showgrid: false, fixedrange: true };
  Object.assign(layout.xaxis, { rangemode: "tozero", title: { text: wrap(panel.axis), font: { size: 11 }, standoff: 8 } });
  if (rows.every(row => row.value === null)) Object.assign(layout.xaxis, BARE);
  layout.bargap = 0;
  return [traces, layout];
}

const LINE_PIXELS = 16;

function bar(row, top, thick, look) {
  return {
    type: "bar", orientation: "h", x: [row.value], y: [top], width: thick, offset: 0, name: "",
    marker: { color: row.group.color },
    hovertemplate: `${plain(row.group.label)}<br>${plain(row.text)}<extra></extra>`,
    error_x: row.low === null || row.high === null || row.value === null ? { visible: false }
      : { type: "data", symmetric: false, array: [row.high - row.value], arrayminus: [row.value - row.low], color: look.ink, thickness: 1.4, width: 4 },
  };
}

// The lines of a label: name and figure, on one line where rows are many.
function barLabel(row, look, dense, room) {
  const text = row.value === null ? "not recorded" : row.text;
  const name = broken(row.group.name, room).map(line => `<span style="color:${look.ink}">${line}</span>`);
  if (!dense) return [...name, plain(text)];
  return narrow() ? name : [...name.slice(0, -1), `${name.at(-1)}  ${plain(text.split(" (")[0])}`];
}

// Break a text between words into lines of so many letters.
const broken = (text, most) => text.split(" ").reduce((lines, word) => {
  const last = lines.at(-1);
  return last && `${last} ${word}`.length <= most ? [...lines.slice(0, -1), `${last} ${word}`] : [...lines, word];
}, []).map(plain);

const wrap = text => broken(text, narrow() ? 46 : 90).join("<br>");

function ends(traces, along = "y") {
  let [least, most] = [Infinity, -Infinity];
  for (const trace of traces) for (const at of trace[along]) if (at !== null) [least, most] = [Math.min(least, at), Math.max(most, at)];
  return [least, most];
}

// The axis spans a share of its largest value at least, so that noise does not look like a trend.
function range(least, most, share) {
  const [middle, half] = [(least + most) / 2, 0.58 * Math.max(most - least, share * Math.abs(most), 1e-12)];
  const bottom = least >= 0 ? Math.max(0, middle - half) : middle - half;
  return [bottom, Math.max(middle + half, bottom + 2 * half)];
}

// Plotly numbers halves of steps where a step is wide.
const WHOLE_STEPS = 10;
const stepTicks = (first, last) => last - first <= WHOLE_STEPS ? { tickmode: "linear", tick0: 0, dtick: 1 } : { tickmode: "auto" };

function renumber(plot) {
  const ticks = stepTicks(...plot.layout.xaxis.range);
  if (ticks.tickmode !== plot.layout.xaxis.tickmode) {
    loadPlotly().relayout(plot, Object.fromEntries(Object.entries(ticks).map(([key, value]) => [`xaxis.${key}`, value])));
  }
}

function curves(data, index, look) {
  const panel = data.curves[index];
  const traces = [];
  for (const place of curvePlaces(data)) {
    const group = data.groups[place];
    for (const run of group.runs) {
      const y = run.curves[index];
      if (!y.length) continue;
      const numbers = Array.isArray(run.steps) ? run.steps : y.map((_, i) => run.steps + i);
      const begin = panel.steady && run.first !== null ? Math.max(0, numbers.indexOf(run.first)) : 0;
      const x = numbers.slice(begin);
      const name = `${plain(group.label)}<br>${plain(run.name)}`;
      traces.push({
        type: "scatter", mode: "lines", x, y: y.slice(begin), line: { color: group.color, dash: DASHES[group.line], width: 1.6 }, opacity: 0.9,
        hovertemplate: `${name}<br>step %{x}: %{y:.5~g}<extra></extra>`,
      });
    }
  }
  const order = Object.values(DASHES);  // broken lines over whole ones, so that equal curves show
  traces.sort((one, other) => order.indexOf(one.line.dash) - order.indexOf(other.line.dash));
  const layout = base(look, 330);
  Object.assign(layout.xaxis, { title: { text: panel.steady ? "optimizer step, from the end of warm-up" : "optimizer step", standoff: 6 } });
  const [least, most] = ends(traces);
  const log = panel.steady && most >= LOG_SPAN * least;
  const unit = log ? `${panel.unit}, log scale` : panel.unit;
  Object.assign(layout.yaxis, { title: { text: unit, standoff: 8 }, exponentformat: "power", ...(log ? { type: "log", tickvals: LOG_TICKS, ticktext: LOG_TICKS.map(String) } : traces.length ? { range: range(least, most, panel.span) } : {}) });
  if (traces.length) Object.assign(layout.xaxis, stepTicks(...ends(traces, "x")));
  layout.hovermode = "closest";
  if (!traces.length) for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, BARE);
  if (!traces.length) layout.annotations = [{ text: "not recorded in these runs", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  return [traces, layout];
}

function draw(plot) {
  const [data, Plotly] = [pageData(), loadPlotly()];
  const [traces, layout] = (plot.dataset.kind === "bars" ? bars : curves)(data, Number(plot.dataset.index), theme());
  plot.querySelector(".waiting")?.remove();
  const first = !plot.dataset.drawn;
  plot.dataset.drawn = "yes";
  Plotly.react(plot, traces, layout, {
    responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]], displayModeBar: !narrow(),
  });
  if (first && plot.dataset.kind === "curves") plot.on("plotly_relayout", () => renumber(plot));
}

function legend() {
  const data = pageData();
  const rows = allRows().filter(row => !row.hidden);
  const [shown, drawn] = [rows.slice(0, data.mostBars), curvePlaces(data).length];
  const named = new Map(shown.map(row => row.querySelector("th[scope=row]")).map(heading => [heading.innerHTML, heading]));
  document.getElementById("legend").replaceChildren(...[...named.values()].map(heading => {
    return make("li", {}, ...[...heading.childNodes].map(node => node.cloneNode(true)));
  }));
  const title = rows[0]?.closest("tbody").querySelector(".workload th").textContent;
  const more = rows.length > drawn ? ` Curves: ${drawn} of ${rows.length} configurations, of one workload (${title}): filter or sort to see others.` : "";
  document.getElementById("drawn").textContent = `The filter above chooses what is drawn. Drag to zoom, double-click to see all.${more}`;
}

const plots = [...document.querySelectorAll(".plot")];
if (plots.length) {
  const sight = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
  }, { rootMargin: "300px" });
  for (const plot of plots) sight.observe(plot);
  const whenIdle = window.requestIdleCallback ?? (call => setTimeout(call, 200));
  const drawRest = () => {
    const next = plots.find(plot => !plot.dataset.drawn);
    if (next) draw(next);
    if (next) whenIdle(drawRest);
  };
  addEventListener("load", () => whenIdle(drawRest));
  let pending;
  const again = () => {
    clearTimeout(pending);
    pending = setTimeout(() => { legend(); for (const plot of plots) if (plot.dataset.drawn) draw(plot); }, 120);
  };
  document.addEventListener("chosen", again);
  dark.addEventListener("change", again);
  matchMedia("(max-width: 639px)").addEventListener("change", again);
  const forPaper = on => {
    printing = on;
    for (const plot of plots) draw(plot);
  };
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
  legend();
}
