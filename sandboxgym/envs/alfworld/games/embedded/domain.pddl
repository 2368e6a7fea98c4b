;; A household: furniture that stands at spots, items inside the furniture, one agent with one free hand.
(define (domain household)
 (:requirements :adl :typing)
 (:types agent spot furniture item kind)

 (:predicates
   (standing ?a - agent ?s - spot)
   (placed ?f - furniture ?s - spot)
   (hinged ?f - furniture)              ; has a door or a front that opens and closes
   (accessible ?f - furniture)          ; open, or without a door
   (furniturekind ?f - furniture ?k - kind)
   (washes ?f - furniture)
   (heats ?f - furniture)
   (cools ?f - furniture)
   (inside ?i - item ?f - furniture)    ; in or on it
   (itemkind ?i - item ?k - kind)
   (portable ?i - item)
   (washable ?i - item)
   (warmable ?i - item)
   (chillable ?i - item)
   (lamp ?i - item)
   (holds ?a - agent ?i - item)
   (emptyhanded ?a - agent)
   (clean ?i - item)
   (hot ?i - item)
   (cold ?i - item)
   (lit ?i - item)
   (seen ?s - spot)                     ; the rest is only there to give each informative action an effect
   (searched ?f - furniture)
   (studied ?i - item)
   (reflected ?a - agent)
 )

 (:action go
   :parameters (?a - agent ?from - spot ?to - spot ?r - furniture)
   :precondition (and (standing ?a ?from) (placed ?r ?to))
   :effect (and (not (standing ?a ?from)) (standing ?a ?to)))

 (:action open
   :parameters (?a - agent ?s - spot ?r - furniture)
   :precondition (and (hinged ?r) (standing ?a ?s) (placed ?r ?s) (not (accessible ?r)))
   :effect (accessible ?r))

 (:action close
   :parameters (?a - agent ?s - spot ?r - furniture)
   :precondition (and (hinged ?r) (standing ?a ?s) (placed ?r ?s) (accessible ?r))
   :effect (not (accessible ?r)))

 (:action take
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (portable ?i) (standing ?a ?s) (placed ?r ?s) (accessible ?r) (inside ?i ?r) (emptyhanded ?a))
   :effect (and (not (inside ?i ?r)) (holds ?a ?i) (not (emptyhanded ?a))))

 (:action move
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (standing ?a ?s) (placed ?r ?s) (accessible ?r) (holds ?a ?i))
   :effect (and (inside ?i ?r) (not (holds ?a ?i)) (emptyhanded ?a)))

 (:action clean
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (washes ?r) (washable ?i) (standing ?a ?s) (placed ?r ?s) (holds ?a ?i))
   :effect (clean ?i))

 (:action heat
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (heats ?r) (warmable ?i) (standing ?a ?s) (placed ?r ?s) (holds ?a ?i))
   :effect (and (hot ?i) (not (cold ?i))))

 (:action cool
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (cools ?r) (chillable ?i) (standing ?a ?s) (placed ?r ?s) (holds ?a ?i))
   :effect (and (cold ?i) (not (hot ?i))))

 (:action use
   :parameters (?a - agent ?s - spot ?i - item ?r - furniture)
   :precondition (and (lamp ?i) (standing ?a ?s) (placed ?r ?s) (inside ?i ?r))
   :effect (lit ?i))

 (:action examinefurniture
   :parameters (?a - agent ?s - spot ?r - furniture)
   :precondition (and (standing ?a ?s) (placed ?r ?s))
   :effect (searched ?r))

 (:action examineitem
   :parameters (?a - agent ?i - item)
   :precondition (holds ?a ?i)
   :effect (studied ?i))

 (:action look
   :parameters (?a - agent ?s - spot)
   :precondition (standing ?a ?s)
   :effect (seen ?s))

 (:action inventory
   :parameters (?a - agent)
   :precondition ()
   :effect (reflected ?a))

 (:action help
   :parameters (?a - agent)
   :precondition ()
   :effect (reflected ?a))
)
