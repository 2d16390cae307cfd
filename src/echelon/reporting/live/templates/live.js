"use strict";
(() => {
  const kind = document.documentElement.dataset.kind;
  const phases = ["data", "forward", "backward", "communicate", "update", "other"];
  const named = (phase) => phase === "communicate" ? "communication" : phase;
  const every = 1000, most = 15000;
  const byId = (id) => document.getElementById(id);
  const query = new URLSearchParams(location.search);
  if (query.has("token")) history.replaceState(null, "", location.pathname); // the cookie has it: keep it off the screen

  const number = (v, digits = 0) => v === null || v === undefined ? "–" : v.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const metric = (v) => v && Math.abs(v) < 0.001 ? String(Number(v.toPrecision(3))) : number(v, 4);
  const percent = (v, scale = 100) => v === null || v === undefined ? "–" : `${Math.round(v * scale)}%`;
  const seconds = (s) => {
    if (s === null || s === undefined) return "–";
    if (s < 0.9995) return `${Number((s * 1e3).toPrecision(3))} ms`;
    if (s < 59.95) return `${Number(s.toPrecision(3))} s`;
    const whole = Math.round(s), minutes = Math.floor(whole / 60);
    return minutes < 60 ? `${minutes}m ${whole % 60}s` : `${Math.floor(minutes / 60)}h ${minutes % 60}m`;
  };
  const bytes = (b) => {
    if (b === null || b === undefined) return "–";
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (Math.abs(b) < 999.5) return `${unit === "B" ? Math.round(b) : Number(b.toPrecision(3))} ${unit}`;
      b /= 1000;
    }
    return `${Number(b.toPrecision(3))} TB`;
  };

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }
  const vector = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  function table(id, head, rows) { // a row: {cells: [text or node], bad}; cells from the second on are numbers, if so said in the head
    const whole = byId(id);
    const top = element("tr");
    for (const [text, numeric] of head) top.append(element("th", text, { scope: "col", ...(numeric ? { class: "number" } : {}) }));
    whole.tHead.replaceChildren(top);
    whole.tBodies[0].replaceChildren(...rows.map(({ cells, bad }) => {
      const row = element("tr", null, bad ? { class: "bad" } : {});
      cells.forEach((cell, i) => {
        const made = element(i ? "td" : "th", null, i ? { class: head[i][1] ? "number" : head[i][2] || "" } : { scope: "row" });
        made.append(cell);
        row.append(made);
      });
      return row;
    }));
    const box = whole.parentElement;
    box.classList.toggle("overflows", box.scrollWidth > box.clientWidth + 1);
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.85);
    const found = [];
    for (let v = Math.ceil(low / step - 1e-6) * step; v <= high + step * 1e-6; v += step) found.push(Number(v.toPrecision(12)));
    return { step, found };
  }

  function chart(id, points, colors, { zero = false, dots = false } = {}) {
    const place = byId(id);
    const known = points.filter((p) => p.slice(1).some((y) => y !== null));
    if (!known.length) {
      place.replaceChildren(element("p", "nothing yet", { class: "empty" }));
      return;
    }
    const width = Math.max(place.clientWidth, 200), height = place.clientHeight || 220;
    const ys = known.flatMap((p) => p.slice(1)).filter((y) => y !== null);
    const x0 = Math.min(0, known[0][0]), x1 = Math.max(known[known.length - 1][0], x0 + 1);
    let low = zero ? 0 : Math.min(...ys), high = Math.max(...ys);
    if (high - low < 1e-9) { low = zero ? 0 : low - Math.abs(low) * 0.05 - 1e-3; high += Math.abs(high) * 0.05 + 1e-3; }
    const { step } = ticks(low, high, 4); // the axis goes from tick to tick, so that what is drawn has one below and above
    low = Math.floor(low / step + 1e-6) * step;
    high = Math.ceil(high / step - 1e-6) * step;
    const labels = ticks(low, high, (high - low) / step).found;
    const text = (v) => v.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)) });
    const left = 12 + 7.2 * Math.max(...labels.map((v) => text(v).length)), bottom = height - 34;
    const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - 10);
    const py = (y) => bottom - (y - low) / (high - low) * (bottom - 10);
    const svg = vector("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const v of labels) {
      svg.append(vector("line", { class: "grid", x1: left, x2: width - 10, y1: py(v), y2: py(v) }));
      svg.append(vector("text", { x: left - 7, y: py(v) + 4, "text-anchor": "end" }, text(v)));
    }
    for (const v of ticks(x0, x1, width < 480 ? 3 : 5).found) {
      svg.append(vector("text", { x: px(v), y: bottom + 18, "text-anchor": "middle" }, v.toLocaleString("en")));
    }
    svg.append(vector("text", { x: width - 10, y: height - 1, "text-anchor": "end" }, "step"));
    for (let line = 1; line < known[0].length; line += 1) {
      let path = "", pen = "M";
      for (const p of known) {
        if (p[line] === null || p[line] === undefined) { pen = "M"; continue; }
        path += `${pen}${px(p[0]).toFixed(1)},${py(p[line]).toFixed(1)}`;
        pen = "L";
        if (dots || known.length === 1) {
          const mark = vector("circle", { cx: px(p[0]), cy: py(p[line]), r: 3 });
          mark.style.fill = `var(--${colors[(line - 1) % colors.length]})`;
          svg.append(mark);
        }
      }
      const drawn = vector("path", { d: path });
      drawn.style.stroke = `var(--${colors[(line - 1) % colors.length]})`;
      svg.append(drawn);
    }
    const last = known[known.length - 1].slice(1);
    place.setAttribute("aria-label", `${place.dataset.label ||= place.getAttribute("aria-label")}; now ${last.map((v) => number(v, 4)).join(", ")}`);
    place.replaceChildren(svg);
  }

  function status(name, words) {
    const place = byId("status");
    const text = words ? `${name}: ${words}` : name;
    if (place.textContent !== text) place.textContent = text; // a screen reader says it when it changes
    place.className = `status status-${/^[a-z]+$/.test(name) ? name : "ended"}`;
  }

  function progress(done) {
    const bar = byId("progress");
    bar.setAttribute("aria-valuenow", Math.round(done * 100));
    bar.firstElementChild.style.width = `${100 * done}%`;
  }

  function headlines(items) {
    byId("headlines").replaceChildren(...items.filter((i) => i).map(([label, value, aside]) => {
      const box = element("div");
      box.append(element("dt", label));
      const shown = element("dd", value);
      if (aside) shown.append(element("small", aside));
      box.append(shown);
      return box;
    }));
  }

  function showBars(ranks) {
    const present = phases.filter((p) => ranks.some((r) => (r.phases[p] || 0) > 0.005));
    byId("phase-key").replaceChildren(...present.map((p) => {
      const item = element("li"), sample = element("i");
      sample.style.background = `var(--${p})`;
      item.append(sample, named(p));
      return item;
    }));
    byId("bars").replaceChildren(...ranks.filter((r) => Object.keys(r.phases).length).flatMap((r) => {
      const bar = element("div", null, { class: "bar", role: "img", "aria-label": present.map((p) => `${named(p)} ${percent(r.phases[p] || 0)}`).join(", ") });
      for (const p of present) {
        const part = element("span", null, { title: `${named(p)} ${percent(r.phases[p] || 0)}` });
        part.style.width = `${100 * (r.phases[p] || 0)}%`;
        part.style.background = `var(--${p})`;
        bar.append(part);
      }
      return [element("span", `rank ${r.rank}`), bar];
    }));
    return present;
  }

  function network(u) {
    if (u.sent_per_s === null || u.sent_per_s === undefined) return "–";
    if (u.loopback_per_s > u.sent_per_s + u.received_per_s) return `${bytes(u.loopback_per_s)}/s loopback`;
    return `↑${bytes(u.sent_per_s)}/s ↓${bytes(u.received_per_s)}/s`;
  }

  function showRanks(ranks) {
    const present = showBars(ranks);
    const gpus = ranks.some((r) => r.resources.gpu_memory_bytes != null);
    const hosts = new Set(ranks.map((r) => r.host)).size > 1;
    const dealt = ranks.some((r) => r.samples != null);
    const head = [["rank"], ...(hosts ? [["host"]] : []), ...present.map((p) => [named(p), true]), ["CPU", true], ["memory", true], ["network", true], ...(gpus ? [["GPU", true], ["GPU memory", true]] : []), ...(dealt ? [["samples", true]] : [])];
    table("ranks", head, ranks.map((r) => {
      const u = r.resources, own = u.rss_bytes ?? r.memory_bytes;
      const memory = bytes(own) + (u.loaders_rss_bytes ? ` + ${bytes(u.loaders_rss_bytes)}` : "");
      const gpu = gpus ? [percent(u.gpu_percent, 1), u.gpu_memory_bytes == null ? "–" : `${bytes(u.gpu_memory_bytes)} of ${bytes(u.gpu_memory_total_bytes)}`] : [];
      const name = element("span", null, { class: "rank" }), sample = element("i");
      sample.style.background = `var(--r${r.rank % 8})`;
      name.append(sample, String(r.rank));
      return { cells: [name, ...(hosts ? [r.host] : []), ...present.map((p) => percent(r.phases[p] || 0)), percent(u.cpu_percent, 1), memory, network(u), ...gpu, ...(dealt ? [number(r.samples)] : [])] };
    }));
  }

  function showRun(s) {
    status(s.status, s.message);
    byId("what").textContent = s.what + (s.torn ? ` · ${s.torn} entries of the record are torn or strange and left out` : "");
    progress(s.done);
    headlines([
      ["Step", number(s.step), s.total_steps ? `of ${number(s.total_steps)} (${percent(s.done)}), epoch ${s.epoch} of ${s.epochs}` : ""],
      ["Time", seconds(s.elapsed_s), s.eta_s === null ? "" : `about ${seconds(s.eta_s)} left`],
      [`Evaluation ${s.metric}`, metric(s.value), s.best !== null && s.best !== s.value ? `best ${metric(s.best)}` : ""],
      ["Train loss", metric(s.loss), `of the last 10 s at most${s.train_score === null ? "" : `; train ${s.score_label} ${number(s.train_score, 3)}`}`],
      ["Samples/s", number(s.samples_per_s), s.step_s === null ? "" : `a step takes ${seconds(s.step_s)}`],
      ["Communication", percent(s.communication), `of step time${s.wire_bytes_per_step === null ? "" : `; ${bytes(s.wire_bytes_per_step)} sent a step by all ranks`}`],
      ["Checkpoints", number(s.checkpoints), s.attempts > 1 ? `begun ${s.attempts} times` : ""],
    ]);
    const colors = ["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"];
    chart("loss", s.curves.loss, ["train"]);
    byId("value-title").textContent = `Evaluation ${s.metric}`;
    chart("value", s.curves.value, ["eval"], { dots: true });
    chart("rate", s.curves.rate, ["forward"], { zero: true });
    chart("cpu", s.curves.cpu, colors, { zero: true });
    chart("memory", s.curves.memory, colors, { zero: true });
    byId("gpu-figure").hidden = !s.curves.gpu.length;
    if (s.curves.gpu.length) chart("gpu", s.curves.gpu, colors, { zero: true });
    showRanks(s.ranks);
    table("events", [["time"], ["what"], ["message", false, "message"]], [...s.events].reverse().map((e) => (
      { cells: [new Date(e.t * 1e3).toLocaleTimeString("en-GB"), e.name.replaceAll("_", " "), e.message], bad: e.bad })));
    document.title = `${s.over ? s.status : percent(s.done)} · ${s.name} · Echelon live`;
    return s.over;
  }

  function showStudy(s) {
    status(s.status, s.message);
    byId("what").textContent = s.what;
    progress(s.done);
    headlines([["Runs over", `${s.runs_over} of ${s.runs.length}`, ""], s.eta_s ? ["Left", seconds(s.eta_s), "as long as those before took"] : null]);
    table("runs", [["run"], ["seed", true], ["status"], ["done", true], ["metric", true], ["samples/s", true], ["took", true], ["", false, "message"]], s.runs.map((r) => {
      const label = r.terms ? `${r.candidate} [${r.terms}]` : r.candidate;
      const name = r.there ? element("a", label, { href: `run/${encodeURIComponent(r.name)}/` }) : label;
      return { bad: r.status === "failed" || r.status === "refused", cells: [name, String(r.seed), r.status, percent(r.done), number(r.value, 4), number(r.samples_per_s), r.seconds ? seconds(r.seconds) : "–", r.message] };
    }));
    document.title = `${s.runs_over}/${s.runs.length} · ${s.name} · Echelon live`;
    return s.over;
  }

  let wait = every, shown = null, over = false;
  async function poll() {
    if (!document.hidden || shown === null) {
      try {
        const answer = await fetch("state.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
        if (!answer.ok) throw new Error((await answer.text()).trim());
        shown = await answer.json();
        over = kind === "run" ? showRun(shown) : showStudy(shown);
        document.documentElement.dataset.shown = "1";
        wait = over ? 5 * every : every;
      } catch (error) {
        if (!over) status("lost", error instanceof TypeError ? "the command that serves this page has ended, what is below is the last it said" : error.message);
        wait = Math.min(most, wait * 2);
      }
    }
    setTimeout(poll, wait);
  }
  addEventListener("resize", () => { if (shown) (kind === "run" ? showRun : showStudy)(shown); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) wait = every; });
  poll();
})();
