"""A page in one file: its look, its one script, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root{--ink:#1c2330;--soft:#5b6575;--paper:#fff;--card:#f6f7f9;--rule:#dde1e7;--good:#1a7f4b;--bad:#b3261e;
--0:#2563c9;--1:#c2540a;--2:#1a7f4b;--3:#8b3fb8;--4:#b01e4f;--5:#0e7c86;--6:#7a6a00;--7:#5b6575}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--paper:#14171d;--card:#1c2028;--rule:#323844;
--good:#5fd394;--bad:#ff8a80;--0:#7aa7ff;--1:#ff9d5c;--2:#5fd394;--3:#cf9bf2;--4:#ff86ab;--5:#59cdd8;--6:#d9c54a;--7:#9aa4b5}}
@media print{:root{--ink:#000;--soft:#444;--paper:#fff;--card:#fff;--rule:#bbb;--good:#1a7f4b;--bad:#b3261e;
--0:#2563c9;--1:#c2540a;--2:#1a7f4b;--3:#8b3fb8;--4:#b01e4f;--5:#0e7c86;--6:#7a6a00;--7:#5b6575}
body{padding:0}section,figure,table{break-inside:avoid}#tip{display:none}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:28px 20px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:34px 0 10px;padding-bottom:4px;border-bottom:1px solid var(--rule)}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:6px 0}.soft,figcaption{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}
code,pre{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{background:var(--card);padding:12px;border-radius:8px;overflow:auto;white-space:pre-wrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:18px 0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tiles span{color:var(--soft);font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px}
figure{margin:0;min-width:0}svg{width:100%;height:auto;display:block;overflow:visible}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .name{fill:var(--ink);font-size:13px}
svg .on{fill:var(--paper);font-weight:600}svg .axis-name{font-size:11px}
svg line.grid{stroke:var(--rule)}svg .axis{stroke:var(--soft)}svg .level{stroke:var(--soft);stroke-dasharray:5 4}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .band{opacity:.18;stroke:none}svg .faint{opacity:.4}
svg .interval{stroke-width:10;opacity:.45}svg .middle{stroke-width:3}
.c0{stroke:var(--0);fill:var(--0)}.c1{stroke:var(--1);fill:var(--1)}.c2{stroke:var(--2);fill:var(--2)}
.c3{stroke:var(--3);fill:var(--3)}.c4{stroke:var(--4);fill:var(--4)}.c5{stroke:var(--5);fill:var(--5)}
.c6{stroke:var(--6);fill:var(--6)}.c7{stroke:var(--7);fill:var(--7)}
i.c0{background:var(--0)}i.c1{background:var(--1)}i.c2{background:var(--2)}i.c3{background:var(--3)}
i.c4{background:var(--4)}i.c5{background:var(--5)}i.c6{background:var(--6)}i.c7{background:var(--7)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;margin-top:4px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.wide{overflow-x:auto;margin-top:10px}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:500}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td{overflow-wrap:anywhere}table.narrow{width:auto}table.narrow td:first-child{padding-right:32px}
.grid{margin-top:18px}
details>summary{cursor:pointer;color:var(--0);margin:8px 0}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:5px 9px;border-radius:6px;
font-size:12.5px;white-space:pre;z-index:9}
"""

SCRIPT = """
const tip=document.createElement('div');tip.id='tip';tip.hidden=true;document.body.append(tip);
const say=v=>Math.abs(v)>=1e4?Math.round(v).toLocaleString('en'):+v.toPrecision(4)+'';
for(const svg of document.querySelectorAll('svg.chart')){
 const [x0,x1,xa,xb]=svg.dataset.x.split(' ').map(Number),[y0,y1,ya,yb]=svg.dataset.y.split(' ').map(Number);
 const rule=document.createElementNS('http://www.w3.org/2000/svg','line');
 rule.setAttribute('class','axis');rule.setAttribute('y1',yb);rule.setAttribute('y2',ya);
 rule.style.display='none';svg.append(rule);
 const lines=[...svg.querySelectorAll('.line')].map(l=>[l.dataset.name,[...l.points].map(p=>[p.x,p.y])]);
 svg.addEventListener('pointermove',e=>{
  const p=new DOMPoint(e.clientX,e.clientY).matrixTransform(svg.getScreenCTM().inverse());
  if(p.x<xa||p.x>xb){svg.dispatchEvent(new Event('pointerleave'));return}
  const near=new Map();
  for(const [name,points] of lines){let best=null;
   for(const q of points)if(!best||Math.abs(q[0]-p.x)<Math.abs(best[0]-p.x))best=q;
   const had=near.get(name);if(best&&(!had||Math.abs(best[0]-p.x)<Math.abs(had[0]-p.x)))near.set(name,best)}
  if(!near.size)return;
  const at=x0+(p.x-xa)/(xb-xa)*(x1-x0);
  tip.textContent=[say(at),...[...near].map(([n,q])=>(n?n+'  ':'')+say(y0+(q[1]-ya)/(yb-ya)*(y1-y0)))].join('\\n');
  rule.setAttribute('x1',p.x);rule.setAttribute('x2',p.x);rule.style.display='';
  tip.hidden=false;tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
  tip.style.top=Math.min(e.clientY+14,innerHeight-tip.offsetHeight-8)+'px'});
 svg.addEventListener('pointerleave',()=>{tip.hidden=true;rule.style.display='none'});
}
"""


def page(title: str, body: str) -> str:
    """A whole page. Nothing of it is fetched, and no script runs but ours, whatever a name has in it."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )
