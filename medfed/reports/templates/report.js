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
