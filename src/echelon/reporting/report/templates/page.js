"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const chosen = {};
  const printed = 680; // CSS pixels of an A4 page between its margins

  const token = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function paint(value) {
    if (typeof value === "string") {
      return value.startsWith("@color:") ? token(value.slice(7)) : value;
    }
    if (Array.isArray(value)) return value.map(paint);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, paint(inner)]));
    }
    return value;
  }

  function withTheme(layout, width, count) {
    const narrow = width < 480;
    const named = layout.showlegend !== false && count > 1;
    const axis = (own) => ({
      gridcolor: token("rule"), linecolor: token("rule"), zerolinecolor: token("rule"), automargin: true,
      fixedrange: true, nticks: narrow ? 5 : 8, ...own, title: { standoff: 8, font: { size: 13 }, ...(own || {}).title },
    });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: token("muted") },
      margin: { l: 8, r: 12, t: named ? 34 : 10, b: 8 }, dragmode: false, hovermode: "x unified",
      hoverlabel: { bgcolor: token("wash"), bordercolor: token("rule"), font: { color: token("ink") } },
      ...layout,
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", ...layout.legend },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    };
  }

  function draw(id, print) {
    const element = document.getElementById(id);
    const figure = figures[id];
    const half = !element.closest(".wide");
    const width = print ? (half ? (printed - 24) / 2 : printed) : element.clientWidth;
    const traces = paint(figure.traces);
    const shown = figure.choices[chosen[id] || 0];
    if (shown) traces.forEach((trace, i) => { trace.visible = shown.includes(i); });
    const layout = withTheme(paint(figure.layout), width, traces.length);
    if (print) layout.width = width;
    if (width < 480 && traces.length > 4) {
      const names = layout.showlegend === false ? 0 : traces.filter((trace) => trace.visible !== false).length;
      layout.height += Math.min(200, Math.max(60, 22 * names - 40)); // names below each other, cut off at half the height
    }
    return Plotly.react(element, traces, layout, { displayModeBar: false, responsive: !print, scrollZoom: false });
  }

  const drawAll = (print) => Promise.all(window.Plotly ? Object.keys(figures).map((id) => draw(id, print)) : []);

  for (const select of document.querySelectorAll("select[data-chart]")) {
    select.addEventListener("change", () => {
      chosen[select.dataset.chart] = Number(select.value);
      if (window.Plotly) draw(select.dataset.chart, false);
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(false));
  // Paper cannot be unfolded: what is folded on the screen is printed open.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const details of folded) details.open = true;
    drawAll(true);
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
    drawAll(false);
  });
  // Tables that are wider than the page say so.
  const overflows = () => {
    for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("overflows", box.scrollWidth > box.clientWidth + 1);
  };
  overflows();
  addEventListener("resize", overflows);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", overflows);

  // Unpack plotly.js and run it: an element of text is what this page's policy allows.
  async function loadPlotly() {
    const place = document.getElementById("plotly"), packed = place.textContent;
    if (!packed) throw new Error(`${place.getAttribute("src")}, which all runs of the study draw with, is not there; echelon report RUN writes a page that needs no other file`);
    const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
    if (!window.DecompressionStream) throw new Error("this browser is too old to draw it");
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  async function begin() {
    if (Object.keys(figures).length) await loadPlotly();
    root.dataset.charts = String((await drawAll(false)).length);
  }
  begin().catch((error) => {
    for (const plot of document.querySelectorAll(".plot")) {
      plot.textContent = `No chart: ${error.message}. Its numbers are in the tables.`;
    }
  });
})();
