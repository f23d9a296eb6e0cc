"""The style sheet of all panels. Colours come from the page, so that light and dark themes both read well."""

STYLE = """<style>
.comera { max-width: 1120px; padding: 2px 4px 12px; color: var(--jp-content-font-color1, inherit);
  --comera-line: var(--jp-border-color2, rgba(128,128,128,.35)); --comera-bad: #D55E00; }
.comera, .comera .widget-html-content, .comera .widget-label, .comera input, .comera select, .comera button
  { font-size: 14px; line-height: 1.45; }
.comera .jupyter-widgets { margin: 1px 2px; }
.comera .comera-row { align-items: center; min-height: 34px; }
.comera .comera-label { width: 132px; flex: none; line-height: 28px; height: 28px; margin: 0 2px; }
.comera .comera-entry { width: 84px; flex: none; }
.comera .comera-choice { flex: 0 1 260px; }
.comera .comera-columns { flex-flow: row wrap; align-items: flex-start; gap: 0 28px; }
.comera .comera-columns > * { flex: 1 1 400px; min-width: 330px; }
.comera .comera-columns > .comera-wide { flex: 1 1 560px; }
.comera .comera-slider { flex: 1 1 150px; min-width: 110px; max-width: 340px; margin: 0 10px 0 4px; }
.comera .comera-note { color: var(--jp-content-font-color2, #767676); margin-left: 6px; flex: none; }
.comera .comera-note .widget-html-content { white-space: nowrap; }
.comera .comera-bad { color: var(--comera-bad); margin: 0 0 4px 140px; font-weight: 600; }
.comera h4 { margin: 4px 0 0; font-size: 17px; font-weight: 600; color: inherit; }
.comera p { margin: 2px 0; }
.comera .comera-lead { color: var(--jp-content-font-color2, #767676); margin: 0 0 4px; max-width: 104ch; }
.comera-tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 6px 0; }
.comera-tile { border: 1px solid var(--comera-line); border-radius: 6px; padding: 6px 14px 7px; min-width: 128px; }
.comera-tile b { display: block; font-size: 20px; font-weight: 600; line-height: 1.3;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.comera-tile span { color: var(--jp-content-font-color2, #767676); white-space: nowrap; }
.comera-line { font-variant-numeric: tabular-nums; max-width: 100ch; }
.comera-progress { display: inline-block; width: 120px; height: 8px; border-radius: 4px; margin: 0 10px 1px 0;
  background: rgba(128,128,128,.25); overflow: hidden; vertical-align: middle; }
.comera-progress i { display: block; height: 100%; background: #0072B2; }
.comera-card { border: 1px solid var(--comera-bad); border-left-width: 6px; border-radius: 4px; padding: 6px 12px;
  margin: 4px 0; }
.comera-card pre { font-size: 13px; overflow-x: auto; max-height: 260px; }
.comera-card summary { cursor: pointer; }
.comera .comera-buttons { gap: 2px; margin: 6px 0; }
.comera .comera-buttons button { min-width: 92px; height: 32px; line-height: 30px; }
.comera .t-status { margin: 0 0 4px 2px; min-height: 24px; }
.comera table { font-variant-numeric: tabular-nums; border-collapse: collapse; margin: 4px 0; }
.comera td, .comera th { padding: 2px 14px 2px 0; text-align: right; border-bottom: 1px solid var(--comera-line); }
.comera .comera-saved { border: 1px solid var(--comera-line); border-left: 6px solid #0072B2; padding: 8px 14px;
  max-width: 860px; }
.comera .comera-saved details { margin: 2px 0 2px 14px; }
.comera .comera-saved pre { font-size: 13px; overflow-x: auto; }
.comera a.comera-download { display: inline-block; margin: 4px 8px 2px 0; padding: 3px 12px; border-radius: 3px;
  border: 1px solid var(--comera-line); color: inherit; text-decoration: none; }
.comera a.comera-download:hover, .comera a.comera-download:focus { border-color: #0072B2; outline-color: #0072B2; }
.comera .t-points td:nth-child(2), .comera .t-points th:nth-child(2) { text-align: left; }
.comera .t-points td:first-child { white-space: nowrap; }
.comera td:first-child, .comera th:first-child { text-align: left; }
</style>"""
