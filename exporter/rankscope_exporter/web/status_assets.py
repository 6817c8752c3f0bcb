"""The status page's style and script, and its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib

from rankscope_exporter.report.colors import OWN_COLOR, PHASE_COLORS

REFRESH_SECONDS = 3

STYLE = (
    """
:root{color-scheme:light dark;--line:#8884;--dim:#777;--bad:#d33;--good:#1a8a5c;--warn:#b87a00}
body{font:15px/1.5 system-ui,sans-serif;max-width:88rem;margin:1.2rem auto 2rem;padding:0 1rem}
h1{font-size:1.1rem;margin:0}h1 small{font-weight:400;color:var(--dim)}
h2{font-size:1.05rem;margin:1.6rem 0 0}h2 small{font-weight:400;color:var(--dim)}
nav{margin-top:2rem}nav a{margin-right:1.2em}p{margin:.3rem 0}
.verdict{margin:.8rem 0;padding:.5rem .9rem;border-left:.35rem solid var(--good)}
.verdict.bad{border-color:var(--bad)}.verdict.warn{border-color:var(--warn)}.verdict.unknown{border-color:var(--dim)}
.verdict p{font-size:1.15rem;overflow-wrap:anywhere}
.verdict .advice,.verdict .age{font-size:.95rem;display:block}.age,.dim,.pending,.legend{color:var(--dim)}
.verdict p.pending,.pending,.dim,.legend{font-size:.9rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--dim)}td.n,th.n{text-align:right;padding-right:1.4rem;font-variant-numeric:tabular-nums}
td.bad,b.bad,p.bad{color:var(--bad)}td.good,b.good{color:var(--good)}td.warn,b.warn{color:var(--warn)}
td.bad,td.warn,.verdict b{font-weight:600}tr.bad td{background:#d331}tr.warn td{background:#b87a0020}.ended{opacity:.75}
.scroll{overflow-x:auto}
.bar{display:flex;width:11rem;height:.8rem;background:var(--line)}.bar i{height:100%}
.legend i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
@media(max-width:640px){.wide{display:none}body{padding:0 .6rem}th,td{padding-right:.45rem}
td.n,th.n{padding-right:.6rem}td.text{white-space:normal}}
"""
    + "".join(f".p-{phase}{{background:{color}}}" for phase, color in PHASE_COLORS.items())
    + f".p-own{{background:{OWN_COLOR}}}\n"
)

# Relative links are wrong if a reverse proxy shows the page as /PREFIX, without a slash. fetch() refuses a URL with a
# user and a password. If the exporter stops, the page must not look current.
SCRIPT = f"""
const shown=location.origin+location.pathname;
for(const link of document.querySelectorAll("nav a"))
  link.setAttribute("href",new URL(link.getAttribute("href"),shown.replace(/\\/?$/,"/")));
let read=Date.now();
setInterval(async()=>{{
  if(document.hidden)return;
  try{{
    const answer=await fetch(shown+location.search,{{cache:"no-store"}});
    if(!answer.ok)throw answer.status;
    const page=new DOMParser().parseFromString(await answer.text(),"text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.title=page.title;read=Date.now();
  }}catch{{
    const stale=document.querySelector("#stale");
    stale.textContent=`The exporter does not answer. This page is ${{Math.round((Date.now()-read)/1000)}} s old.`;
    stale.hidden=false;
  }}
}},{REFRESH_SECONDS * 1000});
"""

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: allows only this script, and requests to this exporter."""
