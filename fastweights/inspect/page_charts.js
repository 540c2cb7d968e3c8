// The charts of the page: Plotly's figures, whose data page_charts.py makes.

// Draw a figure of Plotly in the colours of the page; a click goes to the token at that position.
function plot(chart, figure) {
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
  const narrow = chart.clientWidth < 600, axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const layout = Object.assign({}, figure.layout, { font: { color: ink, size: narrow ? 10 : 12 }, hovermode: "closest",
    xaxis: Object.assign({}, figure.layout.xaxis, axis), yaxis: Object.assign({}, figure.layout.yaxis, axis), height: chart.clientHeight,
    showlegend: !narrow && figure.data.length > 1, legend: { font: { size: 10 } } });
  if (narrow && figure.data[0].type === "heatmap") layout.yaxis.showticklabels = false;
  const thinBar = trace => Object.assign({}, trace, { colorbar: Object.assign({}, trace.colorbar, { thickness: 10, title: { text: "" } }) });
  const data = figure.data.map(trace => trace.type === "heatmap" && narrow ? thinBar(trace) : trace);
  Plotly.react(chart, data, layout, { displaylogo: false, responsive: true, displayModeBar: false }).then(() => {
    chart.removeAllListeners?.("plotly_click");
    chart.on("plotly_click", event => chart.jump(event.points[0].x));
  });
}
