"""How the page of a report looks, and the little that it does: sorting, unfolding for print."""

from __future__ import annotations

from medfed.reports.benchmark.canvas import style

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.5rem 0 .5rem;
border-top:1px solid var(--line);padding-top:1rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--c0)}dt{font-weight:600;margin-top:.8rem}dd{margin:0;max-width:48rem}
p,li{max-width:48rem}.note,figcaption{color:var(--soft);font-size:.85rem}
.pictures{columns:23rem 2;column-gap:2rem}
figure{margin:0 0 1.5rem;break-inside:avoid;display:inline-block;width:100%}
figure svg{display:block;width:100%;max-width:31rem;height:auto}
figure img{display:block;width:100%;max-width:31rem;height:auto;background:#fff}
figcaption{max-width:31rem}
.wide{overflow-x:auto;max-height:85vh}table{border-collapse:separate;border-spacing:0;
font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .55rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{position:sticky;top:0;background:var(--paper);z-index:1;cursor:pointer;
color:var(--soft);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper);
max-width:11rem;overflow:hidden;text-overflow:ellipsis}
thead th:first-child{z-index:2}th.words{text-align:left}
td.words{text-align:left;white-space:normal;min-width:7rem}
.list th,.list td{text-align:left;white-space:normal}td small{color:var(--soft)}
.better{color:var(--good)}.worse{color:var(--bad)}b.better,b.worse{font-weight:600}
.cells td{padding:.15rem .35rem;font-size:.78rem}
summary{cursor:pointer;margin:.6rem 0;color:var(--c0)}
pre{white-space:pre-wrap;font-size:.8rem}code{font-size:.85em;overflow-wrap:anywhere}
@media(max-width:30rem){body{padding:.7rem}td:first-child,th:first-child{max-width:7.5rem}}
@media print{body{max-width:none;padding:0;font-size:11px}.wide{overflow:visible;max-height:none}
thead th,td:first-child,th:first-child{position:static}table{font-size:8px}
.cells td{font-size:6px;padding:.05rem .12rem}th,td{padding:.1rem .25rem}figure{width:100%}
h2,h3{break-after:avoid}tr{break-inside:avoid}a{color:inherit;text-decoration:none}}
"""
STYLE = style() + _RULES.replace("\n", "")
# A click on a head sorts a table by that column, numbers as numbers; print shows what is folded.
SCRIPT = """
for(const h of document.querySelectorAll("thead th"))h.onclick=()=>{
const b=h.closest("table").tBodies[0],
i=h.cellIndex,d=h.dataset.d=h.dataset.d==="1"?"-1":"1",v=r=>r.cells[i].dataset.v??
r.cells[i].textContent.replace("−","-");[...b.rows].sort((p,q)=>{const x=v(p),y=v(q),n=x-y;
return d*(isNaN(n)?x.localeCompare(y):n)}).forEach(r=>b.append(r))};
const folded=()=>document.querySelectorAll("details:not([open])");
onbeforeprint=()=>folded().forEach(d=>{d.dataset.p=1;d.open=true});
onafterprint=()=>document.querySelectorAll("details[data-p]").forEach(d=>{d.open=false;
delete d.dataset.p});
const unfold=()=>{for(let e=document.getElementById(decodeURIComponent(location.hash.slice(1)));e;
e=e.parentElement)if(e.tagName==="DETAILS")e.open=true};onhashchange=unfold;unfold();
"""
