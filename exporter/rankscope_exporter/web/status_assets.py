"""The status page's style and script, and its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
from urllib.parse import quote

from rankscope_exporter.report.colors import OWN_COLOR, PHASE_COLORS

REFRESH_SECONDS = 3
ANSWERS_WITHIN = 4
"""Seconds after which an exporter that has not sent the page counts as lost."""

COLORS = {
    "page": ("#ffffff", "#15181c"),
    "text": ("#1c2024", "#e8eaed"),
    "dim": ("#586069", "#a3abb5"),
    "line": ("#d3d8de", "#3a4149"),
    "link": ("#0b57d0", "#8ab4f8"),
    "chart": ("#2563c9", "#7aaaf7"),
    "good": ("#0d6b43", "#52c48f"),
    "warn": ("#8a5200", "#e5a84b"),
    "warn-row": ("#fdf4e1", "#33290f"),
    "bad": ("#b3141f", "#ff857c"),
    "bad-row": ("#fdecec", "#3b1c1d"),
}
"""By name the color on a light and on a dark page."""


def _names(index: int) -> str:
    return ";".join(f"--{name}:{colors[index]}" for name, colors in COLORS.items())


STYLE = (
    f"\n:root{{color-scheme:light dark;{_names(0)}}}\n@media(prefers-color-scheme:dark){{:root{{{_names(1)}}}}}"
    """
body{font:15px/1.5 system-ui,sans-serif;max-width:88rem;margin:1.2rem auto 2rem;padding:0 1rem;
background:var(--page);color:var(--text)}
a{color:var(--link)}code{font:.92em ui-monospace,monospace}
h1{font-size:1.1rem;margin:0;overflow-wrap:anywhere}h1 small{font-weight:400;color:var(--dim)}
h2{font-size:1.05rem;margin:1.6rem 0 0;overflow-wrap:anywhere}h2 small{font-weight:400;color:var(--dim)}
nav{margin-top:2rem}nav a{margin-right:1.2em}p{margin:.3rem 0}
.verdict{margin:.8rem 0;padding:.5rem .9rem;border-left:.35rem solid var(--good)}
.verdict.bad{border-color:var(--bad)}.verdict.warn{border-color:var(--warn)}.verdict.unknown{border-color:var(--dim)}
.verdict p{font-size:1.15rem;overflow-wrap:anywhere}.verdict p+p{margin-top:.7rem}
.verdict .advice,.verdict .age,.verdict .captured,.verdict .evidence{font-size:.95rem;display:block}
.age,.dim,.pending,.legend,.rate{color:var(--dim)}.verdict p.pending,.pending,.dim,.legend,.rate{font-size:.9rem}
#stale{margin:.8rem 0;padding:.6rem .9rem;border:2px solid var(--bad);color:var(--bad);font-weight:600}
main.lost{filter:grayscale(1)}main.lost *{color:var(--dim)!important}main.lost svg{opacity:.5}
main.lost .verdict::before{content:"Last known:";font-weight:600}
.heard{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--dim)}td.n,th.n{text-align:right;padding-right:1.4rem;font-variant-numeric:tabular-nums}
td.bad,b.bad{color:var(--bad)}td.good,b.good{color:var(--good)}td.warn,b.warn{color:var(--warn)}
td.bad,td.warn,.verdict b{font-weight:600}tr.bad td{background:var(--bad-row)}tr.warn td{background:var(--warn-row)}
.ended td,.ended h2{color:var(--dim)}
.scroll{overflow-x:auto}
.bar{display:block;width:11rem;height:.8rem;background:var(--line)}
.chart{width:7.5rem;height:1.3rem;vertical-align:middle;border-bottom:1px solid var(--line)}
.chart polyline{fill:none;stroke:var(--chart);stroke-width:1.5;vector-effect:non-scaling-stroke}
.legend svg{width:.8em;height:.8em;margin:0 .3em 0 1em}
@media(max-width:1200px){td.text{white-space:normal}}
@media(max-width:640px){.wide{display:none}body{padding:0 .6rem}th,td{padding-right:.45rem}
td.n,th.n{padding-right:.6rem}}
""" + "".join(f".p-{phase}{{fill:{color}}}" for phase, color in PHASE_COLORS.items()) + f".p-own{{fill:{OWN_COLOR}}}\n"
)
ICON = "data:image/svg+xml," + quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#2563c9" d="M1 9h3v6H1zm5-4h3v10H6z"/>'
    '<path fill="#d97706" d="M11 1h4v14h-4z"/></svg>',
    safe="/ =:",
)

# Relative links are wrong if a reverse proxy shows the page as /PREFIX, without a slash. fetch() refuses a URL with a
# user and a password. A refresh changes only what differs, so that scroll position, focus and selection stay. A page
# whose exporter does not answer, answers with an error, or is stopped must not look current. A screen reader reads the
# verdict again only if more than its numbers has changed.
SCRIPT = f"""
const shown=location.origin+location.pathname,find=selector=>document.querySelector(selector);
for(const link of document.querySelectorAll("nav a"))
  link.setAttribute("href",new URL(link.getAttribute("href"),shown.replace(/\\/?$/,"/")));
const said=()=>[...document.querySelectorAll(".verdict .said")].map(one=>one.textContent).join(" ");
const shape=text=>text.replace(/[\\d.]+/g,"");
const time=seconds=>seconds<100?`${{seconds}} s`:`${{Math.round(seconds/60)}} min`;
let read=Date.now(),heard=shape(said()),name=document.title,timer,busy=false;
function merge(old,now){{
  if(old.nodeType!==1){{if(old.data!==now.data)old.data=now.data;return}}
  for(const {{name}} of [...old.attributes])if(!now.hasAttribute(name))old.removeAttribute(name);
  for(const {{name,value}} of now.attributes)if(old.getAttribute(name)!==value)old.setAttribute(name,value);
  const children=[...now.childNodes];
  children.forEach((child,index)=>{{
    const here=old.childNodes[index]||null;
    const same=child.id?[...old.children].find(one=>one.id===child.id):here;
    if(!same||same.nodeName!==child.nodeName||(same.id||"")!==(child.id||""))
      return old.insertBefore(document.importNode(child,true),here);
    if(same!==here)old.insertBefore(same,here);
    merge(same,child);
  }});
  while(old.childNodes.length>children.length)old.lastChild.remove();
}}
function keepSelection(change){{
  const selection=getSelection();
  if(!selection.rangeCount||selection.isCollapsed)return change();
  const {{anchorNode:from,anchorOffset:start,focusNode:to,focusOffset:end}}=selection;
  change();
  const within=(node,offset)=>Math.min(offset,node.nodeType===1?node.childNodes.length:node.length);
  if(from.isConnected&&to.isConnected)selection.setBaseAndExtent(from,within(from,start),to,within(to,end));
}}
async function refresh(){{
  const options={{cache:"no-store",signal:AbortSignal.timeout({ANSWERS_WITHIN * 1000})}};
  const answer=await fetch(shown+location.search,options);
  if(!answer.ok)throw{{status:answer.status}};
  const page=new DOMParser().parseFromString(await answer.text(),"text/html"),main=page.querySelector("main");
  if(!main)throw{{status:"with another page"}};
  keepSelection(()=>{{for(const part of ["header","main"])merge(find(part),page.querySelector(part))}});
  document.title=name=page.title;read=Date.now();
  const verdict=said();
  if(shape(verdict)!==heard){{heard=shape(verdict);find("#heard").textContent=verdict}}
}}
function lose(error){{
  const why=error.status?`answers ${{error.status}}`:"does not answer",passed=Math.round((Date.now()-read)/1000);
  const since=new Date(read).toLocaleTimeString();
  find("main").classList.add("lost");
  find("#stale").textContent=`Rankscope ${{why}}. What follows is from ${{since}}, ${{time(passed)}} ago.`;
  find("#stale").hidden=false;
  document.title=`No answer · ${{name}}`;
}}
async function repeat(){{
  if(busy)return;
  clearTimeout(timer);busy=true;
  if(!document.hidden)await refresh().catch(lose);
  busy=false;timer=setTimeout(repeat,{REFRESH_SECONDS * 1000});
}}
document.addEventListener("visibilitychange",()=>{{
  if(document.hidden)return;
  if(Date.now()-read>{2 * ANSWERS_WITHIN * 1000})find("main").classList.add("lost");
  repeat();
}});
timer=setTimeout(repeat,{REFRESH_SECONDS * 1000});
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: allows only this style and script, the icon, and requests to this exporter."""
